"""jax_impl's sparse prefill on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.generate.ownership import local_positions
from compare.houses.jax_backend import JaxBackend, import_jax, jax_device
from compare.houses.ranks import merge_by_jax
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult
from compare.suites.dcp_sparse.implementation import DcpSparse, as_result


class JaxDcpSparse(JaxBackend, DcpSparse):
    """jax_impl.sparse_prefill over the keys that a rank holds, merged by jax_impl.merge_states."""

    functions = ("jax_impl:sparse_prefill", "jax_impl.prefill.indices:global_topk_slots")
    merge = staticmethod(merge_by_jax)

    def call(self, inputs: DcpSparseInputs) -> DcpSparseResult:
        jax = import_jax()
        from jax_impl import sparse_prefill
        from jax_impl.prefill.indices import global_topk_slots

        attend: Any = sparse_prefill  # NumPy arrays are as welcome as jax's
        group = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
        local = local_positions(inputs.topk_positions, *group).astype(np.int32)
        packed = np.take_along_axis(local, np.argsort(local < 0, axis=1, kind="stable"), axis=1)
        cache = inputs.kv_cache
        compiled = self.compilation(max(inputs.q.size, inputs.kv_cache.size))
        with jax.default_device(jax_device(self.device)), compiled:
            slots, lengths = global_topk_slots(
                packed, inputs.token_to_request, inputs.block_table, page_size=cache.shape[1]
            )
            out, _, lse = attend(
                inputs.q,
                cache.reshape(-1, cache.shape[2]),
                slots,
                inputs.sm_scale,
                topk_length=lengths,
                backend=self.name,
            )
            return as_result(*map(np.asarray, (out, lse, lengths)))
