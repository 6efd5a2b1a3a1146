"""The arguments of the whole V4 prefill path: checked once, for the pipeline and the flat call."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from torch_ref.arguments import finite_scale, require_device, require_tensor, shape_of
from torch_ref.calls import called_with
from torch_ref.indices import TokenBatch, image_visibility, token_batch, visible_entries
from torch_ref.indices.checks import table, whole
from torch_ref.indices.visibility import ImageSpans
from torch_ref.indices.workspace import combined_width, listed_entries
from torch_ref.kv_cache import PagedKV
from torch_ref.prefill.inputs import MAX_HEADS, VALUE_WIDTH

FORMATS = ("v4-fp8", "bf16")

_TOGETHER = ("compressed_cache", "compressed_page", "compressed_block_table", "topk_indices")
_ON_ONE_DEVICE = (
    "swa_cache",
    "swa_block_table",
    "compressed_cache",
    "compressed_block_table",
    "topk_indices",
    "query_start_loc",
    "seq_lens",
    "attn_sink",
)


@dataclass(frozen=True, eq=False)
class V4Call:
    """The batch and its caches as they are handed in; v4_prefill says what they mean."""

    q: BFloat16[Tensor, "T H 512"]
    swa_cache: Tensor
    swa_block_table: Int32[Tensor, "n columns"]
    query_start_loc: Int32[Tensor, " n+1"]
    seq_lens: Int32[Tensor, " n"]
    sm_scale: float
    _: KW_ONLY
    swa_page: int
    kv_format: str = "v4-fp8"
    compress_ratio: int
    compressed_cache: Tensor | None = None
    compressed_page: int | None = None
    compressed_block_table: Int32[Tensor, "n columns2"] | None = None
    topk_indices: Int32[Tensor, "T topk"] | None = None
    window: int = 128
    attn_sink: Float32[Tensor, " H"] | None = None
    image_spans: ImageSpans | None = None
    max_image_tokens: int = 0


@dataclass(frozen=True, eq=False)
class V4Inputs:
    """One sparse prefill over paged caches: n requests whose T tokens are q's rows.

    compressed, its table and topk_indices are all given or all None. image_left and image_right
    are image_visibility's counts, None without images.
    """

    q: BFloat16[Tensor, "T H 512"]
    swa: PagedKV
    swa_block_table: Int32[Tensor, "n columns"]
    compressed: PagedKV | None
    compressed_block_table: Int32[Tensor, "n columns2"] | None
    topk_indices: Int32[Tensor, "T topk"] | None
    query_start_loc: Int32[Tensor, " n+1"]
    seq_lens: Int32[Tensor, " n"]
    batch: TokenBatch
    sm_scale: float
    attn_sink: Float32[Tensor, " H"] | None
    compress_ratio: int
    window: int
    image_left: Int32[Tensor, " T"] | None
    image_right: Int32[Tensor, " T"] | None
    max_image_tokens: int

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def topk(self) -> int:
        """Columns of the compressed lists, 0 without a compressed cache."""
        return 0 if self.topk_indices is None else self.topk_indices.shape[1]

    @property
    def compressed_lens(self) -> tuple[int, ...]:
        """Compressed entries of each request, 0 without a compressed cache."""
        if self.compressed is None:
            return (0,) * len(self.batch.seq_lens)
        return tuple(length // self.compress_ratio for length in self.batch.seq_lens)


def check_call(call: V4Call) -> V4Inputs:
    """Checks rank, dtype, shape, device and values; ValueError names the argument that doesn't fit.

    The message says what the argument was and what is accepted.

    Accepted: q bf16 [T, H, 512], H in 1..128, T what query_start_loc [n + 1] counts; caches of
    kv_format "v4-fp8" or "bf16" with pages of swa_page and compressed_page tokens and tables int32
    [n, columns]; seq_lens int32 [n]; topk_indices int32 [T, topk] whose first min((pos + 1) //
    compress_ratio, topk) entries of a row are ones that its token sees; attn_sink fp32 [H];
    image_spans as in image_visibility. The four arguments of the compressed cache come together,
    and with a ratio above 1 they must. Lists of topk, window and max_image_tokens together have to
    be of a width that int32 holds. Pages that a token needs are checked when they are read.
    """
    q, topk_indices, attn_sink = call.q, call.topk_indices, call.attn_sink
    require_tensor("q", q, torch.bfloat16)
    if q.ndim != 3 or q.shape[2] != VALUE_WIDTH:
        raise ValueError(f"q: shape {shape_of(q)}; accepted is [T, H, {VALUE_WIDTH}]")
    T, H, _ = q.shape
    if not 1 <= H <= MAX_HEADS:
        raise ValueError(f"q: {H} heads; accepted are 1 to {MAX_HEADS}")
    if call.kv_format not in FORMATS:
        raise ValueError(f"kv_format: {call.kv_format!r}; accepted are {' and '.join(FORMATS)}")
    batch = token_batch(call.query_start_loc, call.seq_lens)
    n = len(batch.seq_lens)
    if batch.tokens != T:
        raise ValueError(f"q: {T} rows; query_start_loc counts {batch.tokens} tokens")
    compress_ratio = whole("compress_ratio", call.compress_ratio, 1)
    window = whole("window", call.window, 1)
    max_image_tokens = whole("max_image_tokens", call.max_image_tokens, 0)
    swa = _paged("swa_cache", call.swa_cache, call.swa_page, call.kv_format)
    table("swa_block_table", call.swa_block_table, n)
    _require_together(call, compress_ratio)
    compressed = None
    if call.compressed_cache is not None and call.compressed_page is not None:
        compressed = _paged(
            "compressed_cache", call.compressed_cache, call.compressed_page, call.kv_format
        )
        assert call.compressed_block_table is not None and topk_indices is not None
        table("compressed_block_table", call.compressed_block_table, n)
        table("topk_indices", topk_indices, T)
        entries = visible_entries(
            batch.position, compress_ratio=compress_ratio, topk=topk_indices.shape[1]
        )
        listed_entries(topk_indices, batch, entries, ratio=compress_ratio)
    combined_width(0 if topk_indices is None else topk_indices.shape[1], window, max_image_tokens)
    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, torch.float32)
        if attn_sink.shape != (H,):
            raise ValueError(f"attn_sink: shape {shape_of(attn_sink)}; accepted is [H] = [{H}]")
    require_device({name: getattr(call, name) for name in _ON_ONE_DEVICE}, q.device)
    left = right = None
    if call.image_spans is not None:
        left, right = image_visibility(
            call.query_start_loc,
            call.seq_lens,
            call.image_spans,
            max_image_tokens=max_image_tokens,
        )
    return V4Inputs(
        q,
        swa,
        call.swa_block_table,
        compressed,
        call.compressed_block_table,
        topk_indices,
        call.query_start_loc,
        call.seq_lens,
        batch,
        finite_scale(call.sm_scale),
        attn_sink,
        compress_ratio,
        window,
        left,
        right,
        max_image_tokens,
    )


check_v4_inputs = called_with(V4Call)(check_call)


def _paged(name: str, cache: Tensor, page_size: int, kv_format: str) -> PagedKV:
    try:
        return PagedKV(cache, page_size, kv_format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _require_together(call: V4Call, compress_ratio: int) -> None:
    absent = [name for name in _TOGETHER if getattr(call, name) is None]
    if not absent or (len(absent) == len(_TOGETHER) and compress_ratio == 1):
        return
    if len(absent) == len(_TOGETHER):
        raise ValueError(
            f"compressed_cache: None with compress_ratio = {compress_ratio}; only a layer of ratio "
            "1 may have no compressed cache"
        )
    present = [name for name in _TOGETHER if name not in absent]
    raise ValueError(f"{absent[0]}: None; {' and '.join(present)} came without it")
