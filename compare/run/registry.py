"""The names of implementations, in one table: what each is, where it runs, and how it is made."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import cast

from compare.run.implementations import Implementation, UnknownImplementation
from compare.run.together import Together

GOLDEN = "golden:"
ORACLE = "oracle"
_PREFILL, _PLAN = "sparse-prefill", "prefill-plan"
_DECODE, _DECODE_PLAN = "dcp-decode", "decode-plan"
_V4, _STAGES = "v4-prefill", "v4-stages"


Make = Callable[[str | None], Implementation]
"""Builds an implementation for a device in this process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One name. what: for `list` and `doctor`, a few words. parts: by suite, how what serves it is
    built. isolated: it runs in a process of its own, since a fault in a GPU kernel would take the
    judge's own context with it."""

    name: str
    what: str
    parts: Mapping[str, Make]
    isolated: bool = False

    @property
    def suites(self) -> frozenset[str]:
        return frozenset(self.parts)

    def make(self, device: str | None) -> Implementation:
        """The implementation of all its suites."""
        if len(self.parts) == 1:
            return next(iter(self.parts.values()))(device)
        return Together(self.name, {suite: make(device) for suite, make in self.parts.items()})


def _jax(backend: str) -> dict[str, Make]:
    def prefill(device: str | None) -> Implementation:
        from compare.run.jax_implementations import JaxSparsePrefill

        return JaxSparsePrefill(backend, device)

    def decode(device: str | None) -> Implementation:
        from compare.run.jax_decode import JaxDcpDecode

        return JaxDcpDecode(backend, device)

    def v4_stages(device: str | None) -> Implementation:
        from compare.run.jax_v4 import JaxV4Stages

        return JaxV4Stages(backend, device)

    return {_PREFILL: prefill, _DECODE: decode, **_jax_v4(backend), _STAGES: v4_stages}


def _jax_v4(backend: str, *, fused: bool = False) -> dict[str, Make]:
    def v4_prefill(device: str | None) -> Implementation:
        from compare.run.jax_v4 import JaxV4Prefill

        return JaxV4Prefill(backend, device, fused=fused)

    return {_V4: v4_prefill}


def _torch_prefill(device: str | None) -> Implementation:
    from compare.run.torch_implementations import TorchSparsePrefill

    return TorchSparsePrefill("torch", device)


def _torch_decode(device: str | None) -> Implementation:
    from compare.run.torch_decode import TorchDcpDecode

    return TorchDcpDecode("torch", device)


def _torch_v4(device: str | None) -> Implementation:
    from compare.run.torch_v4 import TorchV4Prefill

    return TorchV4Prefill("torch", device)


def _torch_stages(device: str | None) -> Implementation:
    from compare.run.torch_v4 import TorchV4Stages

    return TorchV4Stages("torch", device)


def _flash_mla(device: str | None) -> Implementation:
    from compare.run.cuda_implementations import FlashMla

    return FlashMla("flash_mla", device)


def _flash_mla_decode(device: str | None) -> Implementation:
    from compare.run.cuda_decode import FlashMlaDecode

    return FlashMlaDecode("flash_mla", device)


def _flash_mla_v4(device: str | None) -> Implementation:
    from compare.run.cuda_v4 import FlashMlaV4

    return FlashMlaV4("flash_mla", device)


def _flash_mla_fp8(device: str | None) -> Implementation:
    from compare.run.cuda_v4 import FlashMlaFp8

    return FlashMlaFp8("flash_mla-fp8", device)


def _flashinfer(backend: str) -> Make:
    def make(device: str | None) -> Implementation:
        from compare.run.cuda_decode import FlashInferDecode

        return FlashInferDecode(backend, device)

    return make


def _flashinfer_cute_dsl(device: str | None) -> Implementation:
    from compare.run.cuda_decode import FlashInferCuteDsl

    return FlashInferCuteDsl("flashinfer-cute-dsl", device)


def _jax_planner(device: str | None) -> Implementation:
    from compare.run.jax_implementations import jax_planner

    return jax_planner()


def _jax_decode_planner(device: str | None) -> Implementation:
    from compare.run.jax_decode import jax_decode_planner

    return jax_decode_planner()


def _torch_planners(name: str, rules: str) -> dict[str, Make]:
    def chunks(device: str | None) -> Implementation:
        from compare.run.torch_implementations import torch_planner

        return torch_planner(name, rules)

    def rows(device: str | None) -> Implementation:
        from compare.run.torch_decode import torch_decode_planner

        return torch_decode_planner(name, rules)

    return {_PLAN: chunks, _DECODE_PLAN: rows}


def _vllm(device: str | None) -> Implementation:
    from compare.run.torch_implementations import vllm_planner

    return vllm_planner()


def _vllm_stages(device: str | None) -> Implementation:
    from compare.run.cuda_v4 import VllmStages

    return VllmStages("vllm", device)


TABLE = {
    entry.name: entry
    for entry in (
        Entry(
            name="torch",
            what="eager PyTorch in the kernel's precision recipe; the judge's yardstick",
            parts={
                _PREFILL: _torch_prefill,
                _DECODE: _torch_decode,
                _V4: _torch_v4,
                _STAGES: _torch_stages,
            },
        ),
        Entry(name="xla", what="plain jax.numpy, no Pallas", parts=_jax("xla")),
        Entry(name="pallas", what="the Mosaic GPU kernels", parts=_jax("pallas"), isolated=True),
        Entry(
            name="pallas-interpret",
            what="the same kernels under Pallas' GPU interpreter, small cases",
            parts=_jax("pallas-interpret"),
        ),
        Entry(
            name="xla-fused",
            what="the V4 path in jax.numpy without a workspace",
            parts=_jax_v4("xla", fused=True),
        ),
        Entry(
            name="pallas-fused",
            what="attention that reads V4's pages itself, for Hopper",
            parts=_jax_v4("pallas", fused=True),
            isolated=True,
        ),
        Entry(
            name="pallas-fused-interpret",
            what="the same kernel under Pallas' GPU interpreter, small cases",
            parts=_jax_v4("pallas-interpret", fused=True),
        ),
        Entry(
            name="flash_mla",
            what="the FlashMLA build that is importable",
            parts={_PREFILL: _flash_mla, _DECODE: _flash_mla_decode, _V4: _flash_mla_v4},
            isolated=True,
        ),
        Entry(
            name="flash_mla-fp8",
            what="FlashMLA's sparse decode on V4's pages, a batch entry for each token",
            parts={_V4: _flash_mla_fp8},
            isolated=True,
        ),
        Entry(
            name="flashinfer-fa3",
            what="FlashInfer's paged MLA attention, backend fa3",
            parts={_DECODE: _flashinfer("fa3")},
            isolated=True,
        ),
        Entry(
            name="flashinfer-fa2",
            what="FlashInfer's paged MLA attention, backend fa2",
            parts={_DECODE: _flashinfer("fa2")},
            isolated=True,
        ),
        Entry(
            name="flashinfer-cute-dsl",
            what="FlashInfer's own DCP decode, for Blackwell",
            parts={_DECODE: _flashinfer_cute_dsl},
            isolated=True,
        ),
        Entry(
            name="jax-planner",
            what="planners of jax_impl, the fixed rules",
            parts={_PLAN: _jax_planner, _DECODE_PLAN: _jax_decode_planner},
        ),
        Entry(
            name="torch-planner",
            what="planners of torch_ref, the fixed rules",
            parts=_torch_planners("torch-planner", "fixed"),
        ),
        Entry(
            name="vllm-0.33.0",
            what="planners of torch_ref, the rules that vLLM 0.33.0 ships",
            parts=_torch_planners("vllm-0.33.0", "vllm-0.33.0"),
        ),
        Entry(
            name="vllm",
            what="chunk planner and V4's stages of the vLLM that is importable",
            parts={_PLAN: _vllm, _STAGES: _vllm_stages},
            isolated=True,
        ),
    )
}


def names() -> list[str]:
    """Every name that can be looked up without a file or module of one's own."""
    from compare.tools import golden

    return [*TABLE, *(GOLDEN + name for name in golden.available())]


def find(name: str, device: str | None = None) -> Implementation:
    """The implementation of a name: one of `names()`, MODULE:FUNCTION or FILE.py:FUNCTION.

    device: cpu, cuda or cuda:N; None: a GPU where there is one. Whether it can run here is another
    question: `supports`. UnknownImplementation names the nearest; a user's module is imported in
    its worker, to know whether the function exists.
    """
    from compare.run.user import is_user_name

    if is_user_name(name) or (name in TABLE and TABLE[name].isolated):
        from compare.run.worker import Isolated

        entry = TABLE.get(name)
        implementation = Isolated(name, device, None if entry is None else entry.make(device))
        if entry is None:
            implementation.check()
        return implementation
    return in_process(name, device)


def in_process(name: str, device: str | None = None) -> Implementation:
    """The same, never in a process of its own: a fault in it is a fault of this process."""
    from compare.run import user
    from compare.tools import golden

    if name in TABLE:
        return TABLE[name].make(device)
    if name.startswith(GOLDEN) and name.removeprefix(GOLDEN) in golden.available():
        return cast(Implementation, golden.GoldenImplementation(name.removeprefix(GOLDEN)))
    if user.is_user_name(name):
        return user.UserImplementation(user.load(name), name, device)
    raise UnknownImplementation(_nothing_called(name))


def reason(name: str, device: str | None = None, suite: str | None = None) -> str | None:
    """Why the implementation of that name can't run on this machine at all; None if it can. With
    `suite`, whether it can serve that one of its suites."""
    if name not in TABLE:
        return None if name in names() else _nothing_called(name)
    entry = TABLE[name]
    if suite is not None and suite not in entry.suites:
        return f"{name} isn't for {suite}"
    make = entry.make if suite is None else entry.parts[suite]
    try:
        unavailable = getattr(make(device), "unavailable", None)
        return None if unavailable is None else unavailable()
    except ImportError as error:
        return f"it needs a package that isn't installed here ({error})"


def here(suite: str, device: str | None = None) -> list[str]:
    """The candidates of a run that names none: all of this project's own that can run here. The
    interpreter is left out where the kernel itself runs."""
    if suite in (_PLAN, _DECODE_PLAN):
        return ["jax-planner", "torch-planner"]
    kernel_runs = reason("pallas", device, suite) is None
    own = ["pallas", "xla"] if kernel_runs else ["xla", "pallas-interpret"]
    if suite == _V4:
        own += (
            ["pallas-fused", "xla-fused"]
            if kernel_runs
            else ["xla-fused", "pallas-fused-interpret"]
        )
    return own


def default_reference(suite: str, device: str | None = None) -> str | None:
    """The reference of a run that names none: the live CUDA kernel, else its recorded results. Of
    chunk plans and single stages: those recorded from vLLM 0.33.0, else an importable vLLM. None:
    the oracle alone; plans of decode rows are judged by rules and an independent planner."""
    known = names()
    for name in _REFERENCES[suite]:
        if name in known and reason(name, device, suite if name in TABLE else None) is None:
            return name
    return None


def recorded_references(suite: str) -> list[str]:
    """The recorded results that a run which names no reference falls back to, in this order, for a
    case that its default reference has nothing for."""
    known = names()
    return [n for n in _REFERENCES[suite] if n.startswith(GOLDEN) and n in known]


_REFERENCES = {
    _PREFILL: ("flash_mla", GOLDEN + "h200/flash_mla"),
    _PLAN: (GOLDEN + "engine/vllm-0.33.0", "vllm"),
    _DECODE: (
        "flash_mla",
        "flashinfer-fa3",
        "flashinfer-cute-dsl",
        GOLDEN + "h200/flash_mla_decode",
        GOLDEN + "h200/flashinfer_fa3",
    ),
    _DECODE_PLAN: (),
    _V4: ("flash_mla", GOLDEN + "h200/flash_mla_v4", GOLDEN + "h200/flash_mla_fp8"),
    _STAGES: (GOLDEN + "engine/vllm-0.33.0-stages", "vllm"),
}


def describe(device: str | None = None) -> list[tuple[str, str, str | None]]:
    """(name, what it is, None or why it can't run here) of everything that can be named."""
    rows: list[tuple[str, str, str | None]] = [
        (ORACLE, "PyTorch in float64; a column of every table, not a candidate", None)
    ]
    rows += [(entry.name, entry.what, reason(entry.name, device)) for entry in TABLE.values()]
    rows += [(name, "recorded results", None) for name in names() if name not in TABLE]
    rows.append(("MODULE:FUNCTION, FILE.py:FUNCTION", "a function of one's own", None))
    return rows


def _nothing_called(name: str) -> str:
    if name == ORACLE:
        return "the oracle judges every candidate; it isn't one itself"
    if name.endswith(".py"):
        return f"{name!r} lacks the function; write {name}:FUNCTION"
    known = names()
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return (
        f"no implementation is called {name!r}; the nearest is {close!r} "
        f"(known: {', '.join(known)}, MODULE:FUNCTION, FILE.py:FUNCTION)"
    )
