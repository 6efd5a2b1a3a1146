"""The suites: for each, how a case is read, how its inputs are made and who judges it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from compare.cases.case import Case, CaseError, parse_case_of
from compare.cases.dcp_decode import DcpDecodeCase
from compare.cases.decode_plan import DecodePlanCase
from compare.cases.inputs import (
    DcpDecodeInputs,
    DecodePlanInputs,
    Inputs,
    PrefillPlanInputs,
    SparsePrefillInputs,
)
from compare.cases.make_decode import dcp_decode_inputs
from compare.cases.make_plan import decode_plan_inputs, prefill_plan_inputs
from compare.cases.make_prefill import sparse_prefill_inputs
from compare.cases.make_v4 import v4_prefill_inputs
from compare.cases.make_v4_stages import v4_stages_inputs
from compare.cases.prefill_plan import PrefillPlanCase
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.cases.v4_inputs import V4PrefillInputs, V4StagesInputs
from compare.cases.v4_prefill import V4PrefillCase
from compare.cases.v4_stages import V4StagesCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite. inputs_type: what its implementations are given. make_inputs: Case -> Inputs,
    always the same bytes on every machine."""

    name: str
    case_type: type[Case]
    inputs_type: type
    make_inputs: Callable[[Any], Inputs]


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="sparse-prefill",
            case_type=SparsePrefillCase,
            inputs_type=SparsePrefillInputs,
            make_inputs=sparse_prefill_inputs,
        ),
        Suite(
            name="prefill-plan",
            case_type=PrefillPlanCase,
            inputs_type=PrefillPlanInputs,
            make_inputs=prefill_plan_inputs,
        ),
        Suite(
            name="dcp-decode",
            case_type=DcpDecodeCase,
            inputs_type=DcpDecodeInputs,
            make_inputs=dcp_decode_inputs,
        ),
        Suite(
            name="decode-plan",
            case_type=DecodePlanCase,
            inputs_type=DecodePlanInputs,
            make_inputs=decode_plan_inputs,
        ),
        Suite(
            name="v4-prefill",
            case_type=V4PrefillCase,
            inputs_type=V4PrefillInputs,
            make_inputs=v4_prefill_inputs,
        ),
        Suite(
            name="v4-stages",
            case_type=V4StagesCase,
            inputs_type=V4StagesInputs,
            make_inputs=v4_stages_inputs,
        ),
    )
}


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


def suite_of(inputs: Inputs) -> str:
    """The name of the suite whose inputs these are."""
    return next(s.name for s in SUITES.values() if isinstance(inputs, s.inputs_type))
