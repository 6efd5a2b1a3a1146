"""What a function of sparse attention on a DCP rank is called with and gives back."""

from __future__ import annotations

from collections.abc import Callable

from compare.houses.ranks import run_shards
from compare.protocol.signature import BF16, INT32, Signature, Tensor
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult


class DcpSparseSignature(Signature[DcpSparseInputs, DcpSparseResult]):
    """One rank's call; all ranks are as many calls, whose results are merged."""

    def run(
        self, call: Callable[[DcpSparseInputs], DcpSparseResult], inputs: DcpSparseInputs
    ) -> DcpSparseResult:
        return call(inputs) if inputs.shards is None else run_shards(call, inputs)


SIGNATURE = DcpSparseSignature(
    inputs_type=DcpSparseInputs,
    result_type=DcpSparseResult,
    telling="topk_positions",
    tensors={
        "q": Tensor(dtypes=BF16, axes="T H 512"),
        "kv_cache": Tensor(dtypes=BF16, axes="pages P 512"),
        "block_table": Tensor(dtypes=INT32, axes="B max_pages"),
        "token_to_request": Tensor(dtypes=INT32, axes="T"),
        "topk_positions": Tensor(dtypes=INT32, axes="T K"),
    },
    numbers=("sm_scale",),
    apart=("shards",),
    results={"out": True, "lse": True},
    answered=("out", "lse"),
    empty_lse="-inf",
)
