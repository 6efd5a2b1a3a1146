"""FlashMLA's sparse prefill as it is timed: the kernel's own function and nothing around it."""

from __future__ import annotations

from typing import Any

from compare.houses.torch_backend import torch_launch
from compare.judging.attention_call import SparsePrefillResult
from compare.protocol import arrays as convert
from compare.protocol.timing import Launch


def kernel_launch(arguments: tuple[Any, ...], options: dict[str, Any], device: str) -> Launch:
    """FlashMLA's own function on torch_ref's arguments. ValueError where it would need padding."""
    import torch

    from torch_ref.cuda import flash_mla_adapter as adapter
    from torch_ref.prefill.inputs import check_inputs

    checked = check_inputs(*arguments, **options)
    if reason := adapter.unsupported_reason(d_qk=checked.q.shape[2]):
        raise NotImplementedError(reason)
    build = adapter.find_build()
    assert build is not None
    inputs, notes = adapter.pad_for_kernel(checked)
    if notes:
        raise ValueError(f"the time would include what FlashMLA doesn't do itself: {notes[0]}")
    hopper = torch.cuda.get_device_capability()[0] == 9
    legacy = {"use_legacy": hopper or inputs.q.shape[2] == 576} if build.takes_use_legacy else {}
    kv, indices = inputs.kv[:, None, :], inputs.indices[:, None, :]

    def call() -> Any:
        return build.function(
            inputs.q,
            kv,
            indices,
            inputs.sm_scale,
            512,
            inputs.attn_sink,
            inputs.topk_length,
            **legacy,
        )

    def result(found: Any) -> SparsePrefillResult:
        out, max_logits, lse = map(convert.to_numpy, found)
        return SparsePrefillResult(out=out, max_logits=max_logits, lse=lse)

    return torch_launch(call, device, result)
