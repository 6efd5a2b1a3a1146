"""Python's door to the judge: `compare.check`, `compare.judge` and `compare.assert_agrees`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from compare.houses.torch_backend import torch_device
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.plans import DecodePlanInputs, DecodePlanResult, PlanResult, PrefillPlanInputs
from compare.protocol.arrays import to_numpy
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs, Result
from compare.protocol.report import Report, Row
from compare.protocol.verdict import Status, Verdict
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.table import SUITES, make_inputs, parse_case
from compare.suites.v4_prefill.call import V4_PREFILL_ARRAYS, V4PrefillInputs, V4PrefillResult
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import STAGES
from compare.user.answers import (
    dcp_decode_result,
    decode_plan_result,
    plan_result,
    sparse_prefill_result,
    v4_prefill_result,
    v4_stages_result,
)
from compare.user.implementation import UserImplementation
from compare.user.own_tensors import check_arrays, check_decode, check_result, real_number

_ARRAYS = {
    "sparse-prefill": ("q", "kv", "indices", "attn_sink", "topk_length"),
    "dcp-decode": (
        "q",
        "kv_cache",
        "block_table",
        "seq_lens",
        "query_start_loc",
        "total_lens",
    ),
    "v4-prefill": V4_PREFILL_ARRAYS,
}
_RESULTS: dict[type[Inputs], type[Result]] = {
    SparsePrefillInputs: SparsePrefillResult,
    PrefillPlanInputs: PlanResult,
    DcpDecodeInputs: DcpDecodeResult,
    DecodePlanInputs: DecodePlanResult,
    V4PrefillInputs: V4PrefillResult,
    V4StagesInputs: V4StagesResult,
}


def check(
    target: str | Callable[..., Any],
    suite: str = "sparse-prefill",
    reference: str | None = None,
    cases: Iterable[str | Case] | None = None,
    *,
    profile: str = "calibrated",
    device: str | None = None,
    timeout: float | None = 600.0,
    repeat: int = 1,
) -> Report:
    """Judges a candidate on the cases of a suite, as `mla-crosscheck run` does.

    target: MODULE:FUNCTION, FILE.py:FUNCTION or a name of the registry, run as there (a user's
    function in a process of its own); or a callable, run in this process. `compare.candidate` says
    what a function is given and gives back.
    suite: sparse-prefill, prefill-plan, dcp-decode, decode-plan, v4-prefill or v4-stages.
    reference: a name of the registry; "oracle" for the float64 oracle alone; None: a live CUDA
    kernel where there is one, else the recorded results.
    cases: case lines or cases; None: the suite's default cases.
    profile: calibrated, flashmla or both. device: cpu, cuda or cuda:N. timeout: seconds for one
    call. repeat: runs of each case, whose bits must agree.

    ValueError for a suite or a case that doesn't exist, UnknownImplementation (a LookupError) for a
    target or reference that doesn't.
    """
    from compare.run import runner
    from compare.run.tasks import Options
    from compare.suites.table import default_cases

    _known(suite, SUITES, "suite")
    chosen = default_cases(suite) if cases is None else tuple(map(_case, cases))
    candidate = target if isinstance(target, str) else UserImplementation(target, device=device)
    named = frozenset() if cases is None else frozenset(chosen)
    options = Options(profile=profile, device=device, timeout=timeout, repeat=repeat, named=named)
    return runner.run(chosen, [candidate], reference, options)


def judge(
    suite: str,
    inputs: Inputs | Mapping[str, Any] | Case | str,
    result: Any,
    *,
    reference: Any = None,
    profile: str = "calibrated",
    device: str | None = None,
) -> Verdict:
    """Judges a result of one's own on tensors of one's own; no case line is needed.

    inputs: a mapping of the suite's arguments (or a case, or its line). sparse-prefill: q [T, H, D]
    bfloat16, kv [S, D] or [S, 1, D] bfloat16, indices [T, K] or [T, 1, K] int32, sm_scale, and
    where there are such attn_sink [H] float32 and topk_length [T] int32; torch, jax or NumPy.
    dcp-decode: q [T, H, 576], kv_cache [pages, P, 576], block_table [B, max_pages], seq_lens [B],
    query_start_loc [B + 1], total_lens [B] (int32 all four), sm_scale, and where they aren't the
    defaults max_query_len (the longest query), dcp_rank 0, dcp_world 1, interleave 1, causal True,
    kv_scale None, q_scale None. v4-prefill: the fields of V4PrefillInputs; v4-stages: stage, and
    arguments by name, as in V4StagesInputs. prefill-plan, decode-plan: the planner's arguments.
    result: (out, max_logits, lse), of decode (out, lse), of a stage what it gives back, or a
    mapping or an object with these names; of a planner its chunks, or its rows.
    reference: a result that is believed, or the name of an implementation to be run on these
    inputs; None: the oracle alone.
    profile: calibrated, flashmla or both. device: where torch computes the oracle; None: cuda where
    there is one.

    ValueError for arguments that no implementation may be given, TypeError for what isn't a result.
    """

    _known(suite, SUITES, "suite")
    given = as_inputs(suite, inputs)
    answer = _result(given, result, "result")
    if isinstance(reference, str):
        from compare.run import registry

        reference = registry.find(reference, device).run(given)
    elif reference is not None:
        reference = _result(given, reference, "reference")
    known = SUITES[suite]
    evidence = known.evidence(given, functools.partial(torch_device, device))
    return known.judge(given, answer, reference, profile=profile, evidence=evidence)


def assert_agrees(
    suite: str,
    inputs: Inputs | Mapping[str, Any] | Case | str,
    result: Any,
    *,
    reference: Any = None,
    profile: str = "calibrated",
    device: str | None = None,
) -> None:
    """`judge` as an assertion, for one's own tests: AssertionError with the verdict in words where
    the result isn't right, or where the reference itself isn't. Arguments are those of `judge`."""
    from compare.report.text import failure_lines, passed_lines

    given = as_inputs(suite, inputs)
    verdict = judge(suite, given, result, reference=reference, profile=profile, device=device)
    name = reference if isinstance(reference, str) else None if reference is None else "reference"
    line = "tensors of the caller's own" if given.case is None else str(given.case)
    row = Row(case=line, candidate="result", reference=name, verdict=verdict, seconds=0.0)
    if verdict.status is not Status.PASS:
        # There is no command that makes these tensors again.
        lines = failure_lines(row, Report(rows=(row,), environment={}, profile=profile))
        raise AssertionError("\n".join(x for x in lines if not x.startswith("reproduce: ")))
    if verdict.reference_failed:
        raise AssertionError("\n".join(passed_lines(row)))


def as_inputs(suite: str, inputs: Inputs | Mapping[str, Any] | Case | str) -> Inputs:
    """A suite's inputs from whatever describes them: see `judge`."""
    kind = SUITES[_known(suite, SUITES, "suite")].inputs_type
    if isinstance(inputs, tuple(known.inputs_type for known in SUITES.values())):
        if isinstance(inputs, kind):
            return _checked(suite, inputs)  # type: ignore[arg-type]
        raise TypeError(f"inputs is a {type(inputs).__name__}; {suite} takes a {kind.__name__}")
    if isinstance(inputs, (str, Case)):
        made = make_inputs(_case(inputs))
        if isinstance(made, kind):
            return made
        raise ValueError(f"inputs: {inputs} isn't a case of {suite}")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}; accepted: a mapping of {suite}'s arguments, a "
            "case or its line"
        )
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in ("case", "shards")}
    for name in inputs:
        _known(name, fields, f"argument of {suite}")
    given = dict(inputs)
    if kind is DcpDecodeInputs and given.get("max_query_len") is None:
        given["max_query_len"] = _longest_query(given.get("query_start_loc"))
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and given.get(name) is None:
            raise ValueError(f"inputs: {name} is missing; {suite} needs it")
    if kind is V4StagesInputs:
        return _stage(**given)
    if suite not in _ARRAYS:
        made = kind(**{k: _plain(v, k) for k, v in given.items()})
        if isinstance(made, PrefillPlanInputs):
            _check_batch(made)
        return made
    values: dict[str, Any] = {
        name: to_numpy(value, name) if name in _ARRAYS[suite] and value is not None else value
        for name, value in given.items()
    }
    if kind is SparsePrefillInputs:
        for name in ("kv", "indices"):
            if values[name].ndim == 3 and values[name].shape[1] == 1:
                values[name] = values[name][:, 0]
    values["sm_scale"] = real_number(values["sm_scale"], "sm_scale")
    return _checked(suite, kind(**values))


def _checked(suite: str, inputs: Inputs) -> Inputs:
    """The same inputs. TypeError, ValueError for what nothing can be computed with."""
    check_arrays(inputs, _ARRAYS.get(suite, ()))
    if isinstance(inputs, DcpDecodeInputs):
        check_decode(inputs)
        for shard in inputs.shards or ():
            _checked(suite, shard)
    return inputs


def _stage(stage: str, arguments: Mapping[str, Any]) -> V4StagesInputs:
    """A stage's arguments, arrays of any framework among them."""
    _known(stage, STAGES, "stage")
    made = {
        name: to_numpy(value, name) if hasattr(value, "shape") else value
        for name, value in arguments.items()
    }
    return V4StagesInputs(stage=stage, arguments=made)


def _longest_query(query_start_loc: Any) -> int | None:
    """The longest query of a batch, at least 1; None without its boundaries."""
    if query_start_loc is None:
        return None
    starts = _plain(query_start_loc, "query_start_loc")
    if not isinstance(starts, tuple):
        raise ValueError(f"query_start_loc: {query_start_loc!r}; accepted: [B + 1] whole numbers")
    return max((1, *(end - start for start, end in pairwise(starts))))


def _plain(value: Any, name: str) -> Any:
    """A whole number or lengths, whatever holds them, as int or a tuple of int; ValueError else."""
    if value is None or isinstance(value, bool):
        return value
    one = not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0
    try:
        return operator.index(value) if one else tuple(operator.index(item) for item in value)
    except TypeError:
        raise ValueError(f"{name}: {value!r}; accepted: whole numbers") from None


def _check_batch(inputs: PrefillPlanInputs) -> None:
    """ValueError for a batch that no planner may be given."""
    if len(inputs.seq_lens) != len(inputs.query_lens):
        raise ValueError(
            f"query_lens: {len(inputs.query_lens)} requests; seq_lens has {len(inputs.seq_lens)}"
        )
    for request, (length, query) in enumerate(zip(inputs.seq_lens, inputs.query_lens, strict=True)):
        if not 0 <= query <= length:
            raise ValueError(
                f"query_lens[{request}]: {query}; accepted: 0 to the request's length, {length}"
            )
    for name in ("window", "max_model_len", "max_num_batched_tokens", "chunk_size"):
        if getattr(inputs, name) < 1:
            raise ValueError(f"{name}: {getattr(inputs, name)}; accepted: 1 and more")
    if inputs.compress_ratio < (1 if inputs.has_compressed else 0):
        raise ValueError(f"compress_ratio: {inputs.compress_ratio}; accepted: 0 and more")


def _result(inputs: Inputs, result: Any, name: str) -> Result:
    if isinstance(result, Result):
        return check_result(result, _RESULTS[type(inputs)], name)
    match inputs:
        case SparsePrefillInputs():
            return sparse_prefill_result(result, name)
        case DcpDecodeInputs():
            return dcp_decode_result(result, name)
        case V4PrefillInputs():
            return v4_prefill_result(result, name)
        case V4StagesInputs():
            return v4_stages_result(result, name, inputs.stage)
        case DecodePlanInputs():
            return decode_plan_result(result, name, inputs)
        case _:
            return plan_result(result, name)


def _case(case: str | Case) -> Case:
    return parse_case(case) if isinstance(case, str) else case


def _known(word: str, known: Iterable[str], what: str) -> str:
    if word in known:
        return word
    names = list(known)
    if not isinstance(word, str):
        raise ValueError(f"{what}: {word!r}; accepted: {', '.join(names)}")
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"there is no {what} {word!r}; the nearest is {close!r} (accepted: {', '.join(names)})"
    )
