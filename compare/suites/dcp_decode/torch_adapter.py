"""torch_ref's eager decode."""

from __future__ import annotations

from typing import Any

from compare.houses.torch_backend import TorchDevice, torch_device, torch_launch
from compare.protocol import arrays as convert
from compare.protocol.timing import Launch
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.implementation import DcpDecode


def decode_arguments(inputs: DcpDecodeInputs, device: str) -> tuple[tuple[Any, ...], dict]:
    """The positional and keyword arguments of torch_ref's decode, on `device`; lengths stay on the
    host.
    """
    q, kv_cache, table = (
        convert.to_torch(a, device) for a in (inputs.q, inputs.kv_cache, inputs.block_table)
    )
    lens, starts = (convert.to_torch(a) for a in (inputs.seq_lens, inputs.query_start_loc))
    return (q, kv_cache, table, lens, starts, inputs.sm_scale), {
        "total_lens": convert.to_torch(inputs.total_lens),
        "dcp_rank": inputs.dcp_rank,
        "dcp_world": inputs.dcp_world,
        "interleave": inputs.interleave,
        "causal": inputs.causal,
        "kv_scale": inputs.kv_scale,
        "q_scale": inputs.q_scale,
    }


class TorchDcpDecode(TorchDevice, DcpDecode):
    """torch_ref.dcp_decode: the kernels' precision recipe, eagerly."""

    functions = ("torch_ref:dcp_decode",)

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        return self._call(inputs)

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        import torch

        return self._call(inputs, out_dtype=torch.float32)

    def _call(self, inputs: DcpDecodeInputs, **more: Any) -> DcpDecodeResult:
        import torch_ref

        arguments, options = decode_arguments(inputs, torch_device(self.device))
        result = torch_ref.dcp_decode(*arguments, **options, **more)
        return as_result(result)

    def prepare(self, inputs: DcpDecodeInputs) -> Launch:
        """The eager recipe on arguments that lie on the device."""
        import torch_ref

        device = torch_device(self.device)
        arguments, options = decode_arguments(inputs, device)
        return torch_launch(lambda: torch_ref.dcp_decode(*arguments, **options), device, as_result)


def as_result(found: Any) -> DcpDecodeResult:
    """torch_ref's result as the judge's."""
    return DcpDecodeResult(out=convert.to_numpy(found.out), lse=convert.to_numpy(found.lse))
