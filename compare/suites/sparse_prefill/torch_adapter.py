"""torch_ref's eager sparse prefill."""

from __future__ import annotations

from typing import Any

from compare.houses.torch_backend import TorchDevice, torch_device, torch_launch
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol import arrays as convert
from compare.protocol.timing import Launch
from compare.suites.sparse_prefill.implementation import SparsePrefill


def torch_arguments(inputs: SparsePrefillInputs, device: str) -> tuple[tuple[Any, ...], dict]:
    """The positional and keyword arguments of torch_ref's sparse prefill, on `device`."""
    sink, length = inputs.attn_sink, inputs.topk_length
    q, kv, indices = (convert.to_torch(a, device) for a in (inputs.q, inputs.kv, inputs.indices))
    return (q, kv, indices, inputs.sm_scale), {
        "d_v": inputs.d_v,
        "attn_sink": None if sink is None else convert.to_torch(sink, device),
        "topk_length": None if length is None else convert.to_torch(length, device),
    }


class TorchSparsePrefill(TorchDevice, SparsePrefill):
    """torch_ref.sparse_prefill: the kernel's precision recipe, eagerly."""

    functions = ("torch_ref:sparse_prefill",)

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        import torch_ref

        arguments, options = torch_arguments(inputs, torch_device(self.device))
        result = torch_ref.sparse_prefill(*arguments, **options)
        return as_result(result)

    def prepare(self, inputs: SparsePrefillInputs) -> Launch:
        """The eager recipe on arguments that lie on the device."""
        import torch_ref

        device = torch_device(self.device)
        arguments, options = torch_arguments(inputs, device)
        return torch_launch(
            lambda: torch_ref.sparse_prefill(*arguments, **options), device, as_result
        )


def as_result(found: Any) -> SparsePrefillResult:
    """torch_ref's result as the judge's."""
    return SparsePrefillResult(
        out=convert.to_numpy(found.out),
        max_logits=convert.to_numpy(found.max_logits),
        lse=convert.to_numpy(found.lse),
    )
