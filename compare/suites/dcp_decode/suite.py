"""The suite ``dcp-decode``: one rank's call of causal MLA decode, or all ranks' merged."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.catalogue import INTERPRETED, lines
from compare.suites.dcp_decode.make import dcp_decode_inputs
from compare.suites.dcp_decode.recorded import DcpDecodeRecords
from compare.suites.dcp_decode.signature import SIGNATURE

_JAX = "compare.suites.dcp_decode.jax_adapter:JaxDcpDecode"
_CUDA = "compare.suites.dcp_decode.cuda_adapter"

SUITE = Suite(
    name="dcp-decode",
    case_type=DcpDecodeCase,
    signature=SIGNATURE,
    make_inputs=dcp_decode_inputs,
    lines=lines,
    judging="compare.suites.dcp_decode.judge",
    faults="compare.suites.dcp_decode.faults",
    calibration="compare.suites.dcp_decode.calibration",
    offers=(
        Offer(name="torch", make="compare.suites.dcp_decode.torch_adapter:TorchDcpDecode"),
        Offer(name="xla", make=_JAX),
        Offer(name="pallas", make=_JAX, isolated=True),
        Offer(name="pallas-interpret", make=_JAX, stands_in_for="pallas", marked=INTERPRETED),
        Offer(name="flash_mla", make=f"{_CUDA}:FlashMlaDecode", isolated=True),
        Offer(
            name="flash_mla-flattened",
            make=f"{_CUDA}:FlashMlaDecode",
            options={"flatten": True},
            what="FlashMLA's dense decode, timed with one row per token",
            isolated=True,
        ),
        Offer(
            name="flashinfer-fa3",
            make=f"{_CUDA}:FlashInferDecode",
            options={"backend": "fa3"},
            what="FlashInfer's paged MLA attention, backend fa3",
            isolated=True,
        ),
        Offer(
            name="flashinfer-fa2",
            make=f"{_CUDA}:FlashInferDecode",
            options={"backend": "fa2"},
            what="FlashInfer's paged MLA attention, backend fa2",
            isolated=True,
        ),
        Offer(
            name="flashinfer-cute-dsl",
            make=f"{_CUDA}:FlashInferCuteDsl",
            what="FlashInfer's own DCP decode, for Blackwell",
            isolated=True,
        ),
    ),
    candidates=("pallas", "xla", "pallas-interpret"),
    references=(
        "flash_mla",
        "flashinfer-fa3",
        "flashinfer-cute-dsl",
        "golden:h200/flash_mla_decode",
        "golden:h200/flashinfer_fa3",
    ),
    records=DcpDecodeRecords(),
    timing="compare.suites.dcp_decode.bench",
)
