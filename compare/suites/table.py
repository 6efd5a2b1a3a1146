"""All suites: the one list of them, and what finds a suite by its name, a case or inputs."""

from __future__ import annotations

import difflib

from compare.protocol.case import Case, CaseError, parse_case_of
from compare.protocol.inputs import Inputs
from compare.protocol.suite import Suite
from compare.suites.dcp_decode.suite import SUITE as DCP_DECODE
from compare.suites.dcp_sparse.suite import SUITE as DCP_SPARSE
from compare.suites.decode_plan.suite import SUITE as DECODE_PLAN
from compare.suites.prefill_plan.suite import SUITE as PREFILL_PLAN
from compare.suites.sparse_prefill.suite import SUITE as SPARSE_PREFILL
from compare.suites.v4_prefill.suite import SUITE as V4_PREFILL
from compare.suites.v4_stages.suite import SUITE as V4_STAGES

_ALL = (SPARSE_PREFILL, PREFILL_PLAN, DCP_DECODE, DECODE_PLAN, V4_PREFILL, V4_STAGES, DCP_SPARSE)

SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}

DEFAULT_SUITE = _ALL[0].name
"""The suite of whatever names none."""


def parse_case(line: str) -> Case:
    """The case that a line describes; CaseError for a suite, key or value that doesn't exist."""
    name, colon, words = line.strip().partition(":")
    if name not in SUITES:
        nearest = difflib.get_close_matches(name, SUITES, n=1, cutoff=0.0)[0]
        raise CaseError(f"no suite is called {name!r}; the nearest is {nearest!r}")
    if not colon:
        raise CaseError(f"{line!r} names a suite without a case; write {name}:key=value,...")
    return parse_case_of(SUITES[name].case_type, words)


def make_inputs(case: Case) -> Inputs:
    """The inputs of a case."""
    return SUITES[case.suite].make_inputs(case)


def suite_of(inputs: Inputs) -> Suite:
    """The suite whose inputs these are."""
    return next(suite for suite in SUITES.values() if isinstance(inputs, suite.inputs_type))


def default_cases(suite: str) -> tuple[Case, ...]:
    """The suite at the size that fits any machine: the cases whose CUDA results are recorded."""
    return _cases(suite, full=False)


def full_cases(suite: str) -> tuple[Case, ...]:
    """The suite as --full runs it: the default cases, and where a suite has them a kernel's own
    test matrix and batches as large as in serving.
    """
    return _cases(suite, full=True)


def _cases(suite: str, *, full: bool) -> tuple[Case, ...]:
    """The cases of a suite's lines, each once, in their order."""
    return tuple(dict.fromkeys(map(parse_case, SUITES[suite].lines(full))))
