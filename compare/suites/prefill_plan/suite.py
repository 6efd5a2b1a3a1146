"""The suite ``prefill-plan``: a batch of prefill requests to be cut into chunks."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.prefill_plan.case import PrefillPlanCase
from compare.suites.prefill_plan.catalogue import RECORDED, lines
from compare.suites.prefill_plan.make import prefill_plan_inputs
from compare.suites.prefill_plan.recorded import PrefillPlanRecords
from compare.suites.prefill_plan.signature import SIGNATURE

_PLANNERS = "compare.suites.prefill_plan.planners"

SUITE = Suite(
    name="prefill-plan",
    case_type=PrefillPlanCase,
    signature=SIGNATURE,
    make_inputs=prefill_plan_inputs,
    lines=lines,
    judging="compare.suites.prefill_plan.judge",
    offers=(
        Offer(
            name="jax-planner",
            make=f"{_PLANNERS}:jax_planner",
            what="planners of jax_impl, the fixed rules",
        ),
        Offer(
            name="torch-planner",
            make=f"{_PLANNERS}:torch_planner",
            options={"rules": "fixed"},
            what="planners of torch_ref, the fixed rules",
        ),
        Offer(
            name="vllm-0.33.0",
            make=f"{_PLANNERS}:torch_planner",
            options={"rules": "vllm-0.33.0"},
            what="planners of torch_ref, the rules that vLLM 0.33.0 ships",
        ),
        Offer(
            name="vllm",
            make=f"{_PLANNERS}:vllm_planner",
            what="chunk planner and V4's stages of the vLLM that is importable",
            isolated=True,
        ),
    ),
    plan_command="plan",
    explaining="compare.suites.prefill_plan.explain:explain_plans",
    candidates=("jax-planner", "torch-planner"),
    references=(f"golden:{RECORDED}", "vllm"),
    records=PrefillPlanRecords(),
)
