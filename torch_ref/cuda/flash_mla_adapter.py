"""FlashMLA's sparse prefill through whichever build is importable.

Three builds offer `flash_mla_sparse_fwd`: sgl-flash-mla and deepseek-ai's own (both `flash_mla`,
told apart by the argument `use_legacy`), and the one vendored in vLLM. sgl-flash-mla keeps the
kernels of Hopper, and those of d_qk 576, behind use_legacy=True.

The kernel takes 64 or 128 heads and, on Hopper, widths that are multiples of 128. Other shapes are
padded: heads with zero queries and sink -inf, which no other head can notice, widths with index -1.
vLLM's build has paths for 8, 16 and 32 heads, but the engine pads to 64 too, and so does this.
Nothing here touches CUDA before a function is called.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from torch_ref.cuda.flash_mla_builds import (
    Build,
    Kernel,
    heads_reason,
    pad_heads,
    refusal,
    scale_reason,
)
from torch_ref.prefill import SparsePrefillResult
from torch_ref.prefill.inputs import VALUE_WIDTH, PrefillInputs, check_inputs
from torch_ref.v4 import V4PrefillResult
from torch_ref.v4.pipeline import v4_prefill as pipeline

_KERNEL = Kernel(
    "FlashMLA's sparse prefill",
    "flash_mla_sparse_fwd",
    parameters=("attn_sink", "topk_length"),
    blackwell=True,
)
_WIDTH_MULTIPLE = 128
_TMA_BYTES = 16
_EMPTY_QUERY = (
    "s_q = 0: flash_mla_sparse_fwd can't encode a TMA descriptor for an empty query and fails an "
    "assertion (RuntimeError; unhandled, it ends a serving worker)"
)


def find_build() -> Build | None:
    """The first importable build: the module `flash_mla`, else the one inside vLLM; None if none.

    Imports the build, which loads its CUDA libraries.
    """
    return _KERNEL.find_build()


def unsupported_reason(
    *,
    s_q: int | None = None,
    s_kv: int | None = None,
    heads: int | None = None,
    d_qk: int | None = None,
    topk: int | None = None,
    sm_scale: float | None = None,
    allow_empty: bool = False,
) -> str | None:
    """None, or in a sentence why FlashMLA can't serve this call here; None arguments aren't judged.

    allow_empty lets s_q = 0 through, to show the abort.
    """
    reason = _unservable(s_q, s_kv, heads, d_qk, topk, sm_scale, allow_empty)
    return reason or refusal(_usable_build, d_qk)


def sparse_prefill(
    q: BFloat16[Tensor, "T H D"],
    kv: BFloat16[Tensor, "S D"] | BFloat16[Tensor, "S 1 D"],
    indices: Int32[Tensor, "T K"] | Int32[Tensor, "T 1 K"],
    sm_scale: float,
    *,
    d_v: int = VALUE_WIDTH,
    attn_sink: Float32[Tensor, " H"] | None = None,
    topk_length: Int32[Tensor, " T"] | None = None,
    allow_empty: bool = False,
) -> tuple[SparsePrefillResult, tuple[str, ...]]:
    """FlashMLA's result on CUDA tensors, and in sentences what was padded or copied for it.

    Shapes, dtypes and units are those of torch_ref.sparse_prefill, results stay on the device, lse
    is natural-log and +inf for an empty row.

    ValueError: an argument that doesn't fit; sm_scale <= 0, s_kv = 0; s_q = 0 unless allow_empty
    insists on the call. NotImplementedError: no CUDA, wrong architecture, no build. What the kernel
    raises comes through.
    """
    inputs = check_inputs(
        q, kv, indices, sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length
    )
    S, K = inputs.kv.shape[0], inputs.indices.shape[1]
    D = inputs.q.shape[2]
    reason = _unservable(
        inputs.tokens, S, inputs.heads, D, K, inputs.sm_scale, allow_empty=allow_empty
    )
    if reason is not None:
        raise ValueError(reason)
    build = _usable_build(D)
    return call_padded(build, inputs, legacy=_wants_legacy(build, D))


def v4_prefill(*arguments: Any, **keywords: Any) -> tuple[V4PrefillResult, tuple[str, ...]]:
    """torch_ref.v4_prefill on CUDA tensors with this kernel for the attention of each chunk.

    Arguments and results are torch_ref.v4_prefill's, but for attend; the stages before are eager
    torch. A chunk without query tokens (rules="vllm-0.33.0") is sent to the kernel as the engine
    sends it: the kernel's RuntimeError comes through. Errors are also those of sparse_prefill here.
    """
    notes: dict[str, None] = {}

    def attend(*inputs: Any, **options: Any) -> SparsePrefillResult:
        result, changes = sparse_prefill(*inputs, **options, allow_empty=True)
        notes.update(dict.fromkeys(changes))
        return result

    return pipeline(*arguments, **keywords, attend=attend), tuple(notes)


def call_padded(
    build: Build, inputs: PrefillInputs, *, legacy: bool
) -> tuple[SparsePrefillResult, tuple[str, ...]]:
    """Pads and aligns the inputs, calls the build and strips its results; says what it did."""
    H = inputs.heads
    inputs, notes = pad_for_kernel(inputs)
    options = {"use_legacy": legacy} if build.takes_use_legacy else {}
    out, max_logits, lse = build.function(
        inputs.q,
        inputs.kv[:, None, :],
        inputs.indices[:, None, :],
        inputs.sm_scale,
        VALUE_WIDTH,
        inputs.attn_sink,
        inputs.topk_length,
        **options,
    )
    return SparsePrefillResult(out[:, :H], max_logits[:, :H], lse[:, :H]), notes


def pad_for_kernel(inputs: PrefillInputs) -> tuple[PrefillInputs, tuple[str, ...]]:
    """The same call in a shape and layout that the kernel takes, and what was changed for that."""
    notes: list[str] = []
    q, sink = pad_heads(inputs.q, inputs.attn_sink, notes)

    indices = inputs.indices
    T, K = indices.shape
    padded_width = max(1, -(-K // _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE
    if padded_width != K:
        indices = torch.cat([indices, indices.new_full((T, padded_width - K), -1)], dim=1)
        notes.append(f"top-k width padded from {K} to {padded_width} (index -1)")

    q, kv = _aligned("q", q, notes), _aligned("kv", inputs.kv, notes)
    if indices.stride(-1) != 1:
        indices = indices.contiguous()
        notes.append("indices copied: their last axis was strided")
    length = None if inputs.topk_length is None else inputs.topk_length.contiguous()
    changed = replace(inputs, q=q, kv=kv, indices=indices, attn_sink=sink, topk_length=length)
    return changed, tuple(notes)


def _aligned(name: str, tensor: Tensor, notes: list[str]) -> Tensor:
    """The kernel loads 16 bytes at a time: rows must start at multiples of that."""
    elements = _TMA_BYTES // tensor.element_size()
    steps = [
        stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if size > 1
    ]
    if (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % _TMA_BYTES == 0
        and all(step % elements == 0 for step in steps)
    ):
        return tensor
    notes.append(f"{name} copied: its rows didn't start at multiples of {_TMA_BYTES} bytes")
    return tensor.clone(memory_format=torch.contiguous_format)


def _unservable(
    s_q: int | None,
    s_kv: int | None,
    heads: int | None,
    d_qk: int | None,
    topk: int | None,
    sm_scale: float | None,
    allow_empty: bool,
) -> str | None:
    """What no build can serve, wherever it runs."""
    if s_q == 0 and not allow_empty:
        return _EMPTY_QUERY
    if s_kv == 0:
        return "s_kv = 0: the kernel would be given a pointer to nothing; accepted are 1 and more"
    if reason := heads_reason(heads):
        return reason
    if d_qk is not None and d_qk not in (512, 576):
        return f"d_qk = {d_qk}: accepted are 512 and 576"
    if topk is not None and topk < 0:
        return f"topk = {topk}: accepted are 0 and more"
    return scale_reason(sm_scale)


def _usable_build(d_qk: int | None) -> Build:
    """The build for this width; NotImplementedError says why there is none here."""
    build = _KERNEL.usable_build()
    if build.legacy_missing and _wants_legacy(build, d_qk):
        major, minor = torch.cuda.get_device_capability()
        raise NotImplementedError(
            f"{build.name} {build.version} was built without its legacy kernels, which this needs "
            f"(compute capability {major}.{minor}, d_qk {d_qk or 512})"
        )
    return build


def _wants_legacy(build: Build, d_qk: int | None) -> bool:
    """sgl-flash-mla: Hopper and d_qk 576 are served by its legacy kernels only."""
    if not build.takes_use_legacy:
        return False
    return torch.cuda.get_device_capability()[0] == 9 or d_qk == 576
