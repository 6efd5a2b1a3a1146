"""torch_ref's eager sparse prefill on each rank."""

from __future__ import annotations

from compare.houses.torch_backend import TorchDevice, torch_device
from compare.protocol import arrays as convert
from compare.suites.dcp_sparse.call import DcpSparseInputs, DcpSparseResult
from compare.suites.dcp_sparse.implementation import DcpSparse, as_result


class TorchDcpSparse(TorchDevice, DcpSparse):
    """torch_ref.sparse_prefill over the keys that a rank holds, merged by torch_ref.merge_states.
    Its own rules say which these are.
    """

    functions = ("torch_ref:sparse_prefill", "torch_ref.indices:global_topk_slots")

    def call(self, inputs: DcpSparseInputs) -> DcpSparseResult:
        import torch

        import torch_ref
        from torch_ref.indices import global_topk_slots
        from torch_ref.planning.sharding import local_position, owner_rank

        group = {"dcp_world": inputs.dcp_world, "interleave": inputs.interleave}
        local = [
            [
                local_position(g, **group)
                for g in chosen
                if g >= 0 and owner_rank(g, **group) == inputs.dcp_rank
            ]
            for chosen in inputs.topk_positions.tolist()
        ]
        width = inputs.topk_positions.shape[1]
        packed = torch.tensor([keys + [-1] * (width - len(keys)) for keys in local])
        device = torch_device(self.device)
        q, cache, request, table = (
            convert.to_torch(array, device)
            for array in (inputs.q, inputs.kv_cache, inputs.token_to_request, inputs.block_table)
        )
        lists = packed.reshape(-1, width).int().to(device)
        slots, lengths = global_topk_slots(lists, request, table, page_size=cache.shape[1])
        found = torch_ref.sparse_prefill(
            q, cache.flatten(0, 1), slots, inputs.sm_scale, topk_length=lengths
        )
        return as_result(*map(convert.to_numpy, (found.out, found.lse, lengths)))
