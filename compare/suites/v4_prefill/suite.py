"""The suite ``v4-prefill``: one step of DeepSeek-V4 prefill, from FP8 pages to attention output."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.catalogue import FUSED_INTERPRETED, INTERPRETED, lines
from compare.suites.v4_prefill.make import v4_prefill_inputs
from compare.suites.v4_prefill.recorded import V4PrefillRecords
from compare.suites.v4_prefill.signature import SIGNATURE

_JAX = "compare.suites.v4_prefill.jax_adapter:JaxV4Prefill"
_CUDA = "compare.suites.v4_prefill.cuda_adapter"

SUITE = Suite(
    name="v4-prefill",
    case_type=V4PrefillCase,
    signature=SIGNATURE,
    make_inputs=v4_prefill_inputs,
    lines=lines,
    judging="compare.suites.v4_prefill.judge",
    faults="compare.suites.v4_prefill.faults",
    calibration="compare.suites.v4_prefill.calibration",
    offers=(
        Offer(name="torch", make="compare.suites.v4_prefill.torch_adapter:TorchV4Prefill"),
        Offer(name="xla", make=_JAX),
        Offer(name="pallas", make=_JAX, isolated=True),
        Offer(name="pallas-interpret", make=_JAX, stands_in_for="pallas", marked=INTERPRETED),
        Offer(
            name="xla-fused",
            make=_JAX,
            options={"backend": "xla"},
            what="the V4 path in jax.numpy without a workspace",
        ),
        Offer(
            name="pallas-fused",
            make=_JAX,
            options={"backend": "pallas"},
            what="attention that reads V4's pages itself, for Hopper",
            isolated=True,
        ),
        Offer(
            name="pallas-fused-interpret",
            make=_JAX,
            options={"backend": "pallas-interpret"},
            what="the same kernel under Pallas' GPU interpreter, small cases",
            stands_in_for="pallas-fused",
            marked=FUSED_INTERPRETED,
        ),
        Offer(name="flash_mla", make=f"{_CUDA}:FlashMlaV4", isolated=True),
        Offer(
            name="flash_mla-fp8",
            make=f"{_CUDA}:FlashMlaFp8",
            what="FlashMLA's sparse decode on V4's pages, a batch entry for each token",
            isolated=True,
        ),
    ),
    candidates=(
        "pallas",
        "xla",
        "pallas-interpret",
        "pallas-fused",
        "xla-fused",
        "pallas-fused-interpret",
    ),
    references=("flash_mla", "golden:h200/flash_mla_v4", "golden:h200/flash_mla_fp8"),
    records=V4PrefillRecords(),
    timing="compare.suites.v4_prefill.bench",
)
