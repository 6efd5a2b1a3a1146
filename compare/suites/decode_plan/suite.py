"""The suite ``decode-plan``: a decode batch to be laid out in rows with their bounds."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.decode_plan.case import DecodePlanCase
from compare.suites.decode_plan.catalogue import lines
from compare.suites.decode_plan.make import decode_plan_inputs
from compare.suites.decode_plan.signature import SIGNATURE

_PLANNERS = "compare.suites.decode_plan.planners"

SUITE = Suite(
    name="decode-plan",
    case_type=DecodePlanCase,
    signature=SIGNATURE,
    make_inputs=decode_plan_inputs,
    lines=lines,
    judging="compare.suites.decode_plan.judge",
    offers=(
        Offer(name="jax-planner", make=f"{_PLANNERS}:jax_decode_planner"),
        Offer(
            name="torch-planner",
            make=f"{_PLANNERS}:torch_decode_planner",
            options={"rules": "fixed"},
        ),
        Offer(
            name="vllm-0.33.0",
            make=f"{_PLANNERS}:torch_decode_planner",
            options={"rules": "vllm-0.33.0"},
        ),
    ),
    plan_command="plan --decode",
    explaining="compare.suites.decode_plan.explain:explain_plans",
    candidates=("jax-planner", "torch-planner"),
)
