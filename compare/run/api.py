"""The judge as Python functions: `compare.check`, `compare.judge` and `compare.assert_agrees`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from compare.houses.torch_backend import torch_device
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.protocol.report import Report, Row
from compare.protocol.values import known_word
from compare.protocol.verdict import Status, Verdict
from compare.suites.table import DEFAULT_SUITE, SUITES, parse_case
from compare.user.implementation import UserImplementation
from compare.user.own_tensors import as_inputs, as_result


def check(
    target: str | Callable[..., Any],
    suite: str = DEFAULT_SUITE,
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

    known_word(suite, SUITES, "suite")
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

    known_word(suite, SUITES, "suite")
    given = as_inputs(suite, inputs)
    answer = as_result(given, result, "result")
    if isinstance(reference, str):
        from compare.run import registry

        reference = registry.find(reference, device).run(given)
    elif reference is not None:
        reference = as_result(given, reference, "reference")
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


def _case(case: str | Case) -> Case:
    return parse_case(case) if isinstance(case, str) else case
