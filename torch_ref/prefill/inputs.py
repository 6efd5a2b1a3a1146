"""The arguments of sparse prefill: checked once, then walked in blocks of query tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Bool, Float, Int32
from torch import Tensor

from torch_ref.arguments import finite_scale, require_device, require_tensor, shape_of

VALUE_WIDTH = 512
KEY_WIDTHS = (512, 576)
MAX_HEADS = 128

_KEY_BYTES_CPU = 192 << 20
_KEY_BYTES_CUDA = 4 << 30


@dataclass(frozen=True, eq=False)
class PrefillInputs:
    """Sparse prefill's arguments in one shape: kv [S, D], indices [T, K], all on one device.

    Validity of slot j of token t is `0 <= indices[t, j] < S and j < topk_length[t]`; nothing else
    counts, so INT_MIN, -1, S and INT_MAX are all just invalid, and duplicates stay.
    """

    q: BFloat16[Tensor, "T H D"]
    kv: BFloat16[Tensor, "S D"]
    indices: Int32[Tensor, "T K"]
    sm_scale: float
    attn_sink: Float[Tensor, " H"] | None
    topk_length: Int32[Tensor, " T"] | None

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def on(self, device: torch.device | str | None) -> PrefillInputs:
        """The same inputs on `device`; None leaves them where they are."""
        if device is None:
            return self
        return PrefillInputs(
            self.q.to(device),
            self.kv.to(device),
            self.indices.to(device),
            self.sm_scale,
            None if self.attn_sink is None else self.attn_sink.to(device),
            None if self.topk_length is None else self.topk_length.to(device),
        )


@dataclass(frozen=True, eq=False)
class Block:
    """A block of t query tokens with the keys that its slots name, in a floating dtype."""

    where: slice
    q: Float[Tensor, "t H D"]
    keys: Float[Tensor, "t K D"]
    valid: Bool[Tensor, "t 1 K"]


def blocks(
    inputs: PrefillInputs, rows: Int32[Tensor, " R"] | Tensor, dtype: torch.dtype
) -> Iterator[Block]:
    """Walks `rows` in blocks whose gathered keys and scores stay within a fixed memory budget.

    A key of an invalid slot is all zeros, so that whatever lies in unreferenced rows of kv (NaN
    included) can't reach a product; its score is still to be masked with `valid`.
    """
    K, D = inputs.indices.shape[1], inputs.q.shape[2]
    S = inputs.kv.shape[0]
    # With S = 0 there is no row to read for an invalid slot: one row of zeros stands in.
    kv = inputs.kv if S else inputs.kv.new_zeros(1, D)
    size = torch.finfo(dtype).bits // 8
    per_token = K * D * (size + 2) + 5 * inputs.heads * K * size
    budget = _KEY_BYTES_CUDA if kv.is_cuda else _KEY_BYTES_CPU
    step = max(1, budget // max(per_token, 1))
    slot = torch.arange(K, device=kv.device)

    for start in range(0, len(rows), step):
        where = slice(start, min(start + step, len(rows)))
        chosen = rows[where]
        index = inputs.indices[chosen].long()
        valid = (index >= 0) & (index < S)
        if inputs.topk_length is not None:
            valid &= slot < inputs.topk_length[chosen][:, None]
        keys = kv[index.masked_fill(~valid, 0)].masked_fill_(~valid[:, :, None], 0)
        yield Block(where, inputs.q[chosen].to(dtype), keys.to(dtype), valid[:, None, :])


def check_inputs(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
) -> PrefillInputs:
    """Checks rank, dtype, shape and values; ValueError names the argument, what it was, what fits.

    Accepted: q bf16 [T, H, D] with H in 1..128 and D in {512, 576}; kv bf16 [S, D] or [S, 1, D];
    indices int32 [T, K] or [T, 1, K]; sm_scale finite in fp32; d_v 512; attn_sink fp32 [H];
    topk_length int32 [T] with values in 0..K. T, S and K may be 0. Any strides.
    """
    require_tensor("q", q, torch.bfloat16)
    require_tensor("kv", kv, torch.bfloat16)
    require_tensor("indices", indices, torch.int32)
    if q.ndim != 3:
        raise ValueError(f"q: shape {shape_of(q)}; accepted is [T, H, D]")
    T, H, D = q.shape
    if not 1 <= H <= MAX_HEADS:
        raise ValueError(f"q: {H} heads; accepted are 1 to {MAX_HEADS}")
    if D not in KEY_WIDTHS:
        raise ValueError(f"q: width D = {D}; accepted are 512 and 576")
    if not isinstance(d_v, int) or d_v != VALUE_WIDTH:
        raise ValueError(f"d_v: {d_v!r}; accepted is {VALUE_WIDTH} only")
    kv = _without_unit_axis("kv", kv, "[S, D] or [S, 1, D]")
    if kv.shape[1] != D:
        raise ValueError(f"kv: width {kv.shape[1]}; q's width is {D} and both must be equal")
    indices = _without_unit_axis("indices", indices, "[T, K] or [T, 1, K]")
    if indices.shape[0] != T:
        raise ValueError(f"indices: {indices.shape[0]} rows; q has T = {T} tokens")

    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, torch.float32)
        if attn_sink.shape != (H,):
            raise ValueError(f"attn_sink: shape {shape_of(attn_sink)}; accepted is [H] = [{H}]")
    if topk_length is not None:
        require_tensor("topk_length", topk_length, torch.int32)
        if topk_length.shape != (T,):
            raise ValueError(f"topk_length: shape {shape_of(topk_length)}; accepted is [T] = [{T}]")
        _require_lengths(topk_length, indices.shape[1])
    require_device(
        {"kv": kv, "indices": indices, "attn_sink": attn_sink, "topk_length": topk_length},
        q.device,
    )
    return PrefillInputs(q, kv, indices, finite_scale(sm_scale), attn_sink, topk_length)


def _without_unit_axis(name: str, tensor: Tensor, accepted: str) -> Tensor:
    if tensor.ndim == 3 and tensor.shape[1] == 1:
        return tensor[:, 0, :]
    if tensor.ndim != 2:
        raise ValueError(f"{name}: shape {shape_of(tensor)}; accepted is {accepted}")
    return tensor


def _require_lengths(topk_length: Tensor, K: int) -> None:
    outside = (topk_length < 0) | (topk_length > K)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"topk_length: {int(topk_length[row])} in row {row}; accepted are 0 to K = {K}"
        )
