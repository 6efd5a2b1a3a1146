"""The suite ``v4-stages``: one stage of DeepSeek-V4's prefill path by itself."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.v4_stages.case import V4StagesCase
from compare.suites.v4_stages.catalogue import INTERPRETED, lines
from compare.suites.v4_stages.make import RECORDED, v4_stages_inputs
from compare.suites.v4_stages.recorded import V4StagesRecords
from compare.suites.v4_stages.signature import SIGNATURE

_JAX = "compare.suites.v4_stages.jax_adapter:JaxV4Stages"

SUITE = Suite(
    name="v4-stages",
    case_type=V4StagesCase,
    signature=SIGNATURE,
    make_inputs=v4_stages_inputs,
    lines=lines,
    judging="compare.suites.v4_stages.judge",
    offers=(
        Offer(name="torch", make="compare.suites.v4_stages.torch_adapter:TorchV4Stages"),
        Offer(name="xla", make=_JAX),
        Offer(name="pallas", make=_JAX, isolated=True),
        Offer(name="pallas-interpret", make=_JAX, stands_in_for="pallas", marked=INTERPRETED),
        Offer(name="vllm", make="compare.suites.v4_stages.cuda_adapter:VllmStages", isolated=True),
    ),
    candidates=("pallas", "xla", "pallas-interpret"),
    references=(f"golden:{RECORDED}", "vllm"),
    records=V4StagesRecords(),
)
