"""The suite ``dcp-sparse``: attention over chosen keys on all DCP ranks, merged."""

from __future__ import annotations

from compare.protocol.suite import Offer, Suite
from compare.suites.dcp_sparse.case import DcpSparseCase
from compare.suites.dcp_sparse.catalogue import lines
from compare.suites.dcp_sparse.make import dcp_sparse_inputs
from compare.suites.dcp_sparse.signature import SIGNATURE

SUITE = Suite(
    name="dcp-sparse",
    case_type=DcpSparseCase,
    signature=SIGNATURE,
    make_inputs=dcp_sparse_inputs,
    lines=lines,
    judging="compare.suites.dcp_sparse.judge",
    faults="compare.suites.dcp_sparse.faults",
    offers=(
        Offer(name="torch", make="compare.suites.dcp_sparse.torch_adapter:TorchDcpSparse"),
        Offer(name="xla", make="compare.suites.dcp_sparse.jax_adapter:JaxDcpSparse"),
    ),
    candidates=("xla",),
)
