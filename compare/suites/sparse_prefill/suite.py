"""The suite ``sparse-prefill``: one call of the sparse attention kernel."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.catalogue import INTERPRETED, lines
from compare.suites.sparse_prefill.make import sparse_prefill_inputs
from compare.suites.sparse_prefill.recorded import SparsePrefillRecords
from compare.suites.sparse_prefill.signature import SIGNATURE

_JAX = "compare.suites.sparse_prefill.jax_adapter:JaxSparsePrefill"

SUITE = Suite(
    name="sparse-prefill",
    case_type=SparsePrefillCase,
    signature=SIGNATURE,
    make_inputs=sparse_prefill_inputs,
    lines=lines,
    judging="compare.judging.attention",
    faults="compare.judging.attention_faults",
    calibration="compare.suites.sparse_prefill.calibration",
    offers=(
        Offer(
            name="torch",
            make="compare.suites.sparse_prefill.torch_adapter:TorchSparsePrefill",
            what="eager PyTorch in the kernel's precision recipe; the judge's yardstick",
        ),
        Offer(name="xla", make=_JAX, what="plain jax.numpy, no Pallas"),
        Offer(name="pallas", make=_JAX, what="the Mosaic GPU kernels", isolated=True),
        Offer(
            name="pallas-interpret",
            make=_JAX,
            what="the same kernels under Pallas' GPU interpreter, small cases",
            stands_in_for="pallas",
            marked=INTERPRETED,
        ),
        Offer(
            name="flash_mla",
            make="compare.suites.sparse_prefill.cuda_adapter:FlashMla",
            what="the FlashMLA build that is importable",
            isolated=True,
        ),
    ),
    candidates=("pallas", "xla", "pallas-interpret"),
    references=("flash_mla", "golden:h200/flash_mla"),
    records=SparsePrefillRecords(),
    timing="compare.suites.sparse_prefill.bench",
)
