"""The bench: implementations of a case beside references, each found right before it is timed.

All contenders of a case are made ready (data on the device, planned, compiled) before any of them
is timed, and then take turns. The file is written anew after each case.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from compare.bench import memory
from compare.bench.config import config_words
from compare.bench.measure import (
    ORACLE_TOKENS,
    Oracle,
    SameBits,
    Say,
    environment,
    failure,
    measure,
    oracle_tokens,
    revision,
)
from compare.bench.measurement import Measurement, MemoryRow, NotMeasured, TransferRow
from compare.bench.timing import Contender, Method, interleaved
from compare.houses.torch_backend import torch_device
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.protocol.suite import Suite, lookup
from compare.protocol.timing import Bench, Launch, Transfer, prepare
from compare.run import registry
from compare.suites.table import SUITES, make_inputs

KERNEL = "pallas"
"""The implementation that takes a Config."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """candidates: names; none: the project's own that can run here, interpreters left out. against:
    references by name, the first has to run; none: the suite's. configs: NAME:key=value,... of the
    kernel's tuning. memory: whether peaks are measured, where the suite has them. children:
    processes that measure them at a time. device: cpu, cuda or cuda:N.
    """

    candidates: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    memory: bool = True
    children: int = 4
    device: str | None = None
    method: Method = dataclasses.field(default_factory=Method)


class NoReference(RuntimeError):
    """The first reference can't run here; the message is the reason, in a sentence."""


def run(cases: Sequence[Case], options: Options, out: Path, say: Say) -> Measurement:
    """Measures every case; the measurement lies in `out` too.

    ValueError for a config that isn't accepted, a contender named twice, a suite that isn't timed;
    NoReference; UnknownImplementation.
    """
    benches = {suite: _bench(suite) for suite in dict.fromkeys(case.suite for case in cases)}
    plans = {
        suite: _Contenders.of(SUITES[suite], bench, options) for suite, bench in benches.items()
    }
    measurement = Measurement(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        revision=revision(),
        environment=environment(),
        method={
            **dataclasses.asdict(options.method),
            "clock": "host wall clock, slope between two batch sizes, contenders interleaved",
            "data": "those of each case's line",
            **{name: fact for bench in benches.values() for name, fact in bench.facts.items()},
            "oracle_tokens": ORACLE_TOKENS,
        },
    )
    # Before anything is timed: these processes would disturb the launches.
    if options.memory:
        rows, failed = _memory(cases, benches, plans, options, say)
        measurement = dataclasses.replace(measurement, memory=rows, not_measured=failed)
    for case in cases:
        measurement = _on_one_case(case, benches[case.suite], plans[case.suite], options, say).add(
            measurement
        )
        measurement.write(out)
    return measurement


def _bench(suite: str) -> Bench:
    bench = SUITES[suite].bench()
    if bench is None:
        timed = " and ".join(name for name, known in SUITES.items() if known.timing)
        raise ValueError(f"{suite} isn't timed; those that are: {timed}")
    return bench


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Contenders:
    """What is timed of a suite. make: by name, in the order of the rows, each gives an
    implementation. references: names among them."""

    make: dict[str, Callable[[], Any]]
    references: tuple[str, ...]
    own: tuple[str, ...]

    @classmethod
    def of(cls, suite: Suite, bench: Bench, options: Options) -> _Contenders:
        device = options.device
        against = options.against or bench.against
        own = options.candidates or tuple(
            name
            for name in registry.here(suite.name, device)
            if (offer := suite.offer(name)) is not None and not offer.stands_in_for
        )
        for name in (*against, *own):
            if name not in registry.TABLE:
                registry.in_process(name, device)  # a function: says so where there is none
        main = against[0]
        known = main in registry.TABLE
        if known and (reason := registry.reason(main, device, suite.name)) is not None:
            raise NoReference(f"{main} doesn't run here: {reason}")
        named = [(name, functools.partial(_find, name, suite.name, device)) for name in against]
        named += [(name, functools.partial(_find, name, suite.name, device)) for name in own]
        for text in options.configs:
            named.append(_configured(text, suite, bench, device))
        names = [name for name, _ in named]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two contenders are called {name!r}; each needs a name of its own"
                )
        return cls(make=dict(named), references=tuple(against), own=tuple(own))


def _find(name: str, suite: str, device: str | None) -> Any:
    return memory.part_of(registry.in_process(name, device), suite)


def _configured(
    text: str, suite: Suite, bench: Bench, device: str | None
) -> tuple[str, Callable[[], Any]]:
    """The kernel with another tuning; ValueError for words that aren't a tuning."""
    offer = suite.offer(KERNEL)
    if bench.config is None or offer is None:
        raise ValueError(f"--config {text}: the kernels of {suite.name} take none")
    config_type = lookup(bench.config)
    name, values = config_words(text, config_type)
    return name, functools.partial(lookup(offer.make), name, device, config=config_type(**values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CaseMeasured:
    rows: tuple[Any, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    transfers: tuple[TransferRow, ...] = ()

    def add(self, measurement: Measurement) -> Measurement:
        lists = {f.name: (*getattr(measurement, f.name), *getattr(self, f.name))
                 for f in dataclasses.fields(self)}  # fmt: skip
        return dataclasses.replace(measurement, **lists)


def _on_one_case(
    case: Case, bench: Bench, contenders: _Contenders, options: Options, say: Say
) -> _CaseMeasured:
    """Measures one case, whose data are freed when it returns."""
    line, device = str(case), torch_device(options.device)
    say(f"{line}: inputs")
    inputs = make_inputs(case)
    left_out = bench.redundant(inputs)
    references = [name for name in contenders.references if name not in left_out]
    ready: dict[str, Callable[[], Launch]] = {
        name: functools.partial(_ready, make, inputs)
        for name, make in contenders.make.items()
        if name not in left_out
    }
    backends = [name for name in contenders.own if name in ("pallas", "xla")]
    transfers: dict[str, Transfer] = {}
    for backend in backends:
        if bench.parts is not None:
            ready |= bench.parts(inputs, backend, options.device)
        if bench.transfers is not None:
            transfers |= bench.transfers(inputs, backend, options.device)
    tokens = oracle_tokens(len(inputs.q), torch.device(device))  # type: ignore[attr-defined]
    oracle = Oracle(tokens, *bench.oracle(inputs, tokens, device))
    same = SameBits() if bench.same_bits else None
    rows, failed = measure(
        line, bench.flop(inputs), ready, oracle, references, options.method, say, same
    )
    moved = []
    for name, transfer in transfers.items():
        try:
            moved.append(_transfer(line, name, transfer, options.method))
            say(f"{line}: {name} {moved[-1].us:.1f} us, {moved[-1].gb_per_s:.0f} GB/s")
        except Exception as error:  # as in `measure`: it may fail in any way
            failed.append(failure(line, name, error))
            say(f"{line}: {name} FAILED: {failed[-1].reason}")
    return _CaseMeasured(rows=tuple(rows), not_measured=tuple(failed), transfers=tuple(moved))


def _ready(make: Callable[[], Any], inputs: Inputs) -> Launch:
    return prepare(make(), inputs)


def _transfer(case: str, name: str, transfer: Transfer, method: Method) -> TransferRow:
    """Times what only moves bytes. ValueError for a wrong workspace, or for no measurable time."""
    ready = transfer.prepare()
    ready.once()
    timing = interleaved([Contender(name, ready.launch)], method)[name]
    if not timing.measurable:
        raise ValueError("too short to be told from the clock's noise")
    return TransferRow(
        case=case,
        name=name,
        us=timing.median_us,
        bytes_read=transfer.bytes_read,
        bytes_written=transfer.bytes_written,
        rounds_us=timing.rounds_us,
    )


def _memory(
    cases: Sequence[Case],
    benches: dict[str, Bench],
    plans: dict[str, _Contenders],
    options: Options,
    say: Say,
) -> tuple[tuple[MemoryRow, ...], tuple[NotMeasured, ...]]:
    """Measures device memory, of the suites that ask for it; some processes at a time, since
    nothing is timed."""
    device = torch_device(options.device)
    with ThreadPoolExecutor(options.children) as pool:
        asked = {
            (str(case), name): pool.submit(memory.ask, str(case), name, device)
            for case in cases
            if benches[case.suite].planned is not None
            for name in plans[case.suite].own
        }
    rows, failed = [], []
    for (line, name), answer in asked.items():
        try:
            rows.append(answer.result())
            say(f"{line}: memory of {name} measured")
        except Exception as error:  # the others go on
            failed.append(failure(line, f"{name} (memory)", error))
            say(f"{line}: memory of {name} FAILED: {failed[-1].reason}")
    return tuple(rows), tuple(failed)
