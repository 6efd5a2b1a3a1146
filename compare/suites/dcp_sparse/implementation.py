"""What implementations of sparse attention over DCP ranks have in common."""

from __future__ import annotations

import numpy as np

from compare.houses.ranks import Merge, merge_by_torch, run_shards
from compare.protocol.one_suite import OneSuite
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult
from compare.suites.dcp_sparse.case import DcpSparseCase


class DcpSparse(OneSuite[DcpSparseCase, DcpSparseInputs]):
    """Base of dcp-sparse; a `call` is one rank's, its inputs.shards is None."""

    case_type = DcpSparseCase
    inputs_type = DcpSparseInputs
    merge: Merge = staticmethod(merge_by_torch)

    def compute(self, inputs: DcpSparseInputs) -> DcpSparseResult:
        if inputs.shards is not None:
            return run_shards(self.call, inputs, merge=self.merge)
        return self.call(inputs)


def as_result(out: np.ndarray, lse: np.ndarray, lengths: np.ndarray) -> DcpSparseResult:
    """A sparse prefill's out and lse, whose empty rows have +inf, as a rank's; lengths [T]: how
    many keys a token has there.
    """
    empty = lengths[:, None] == 0
    return DcpSparseResult(out=out, lse=np.where(empty, np.float32(-np.inf), lse))
