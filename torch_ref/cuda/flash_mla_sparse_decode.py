"""FlashMLA's sparse decode over FP8 pages (`flash_mla_with_kvcache` with indices).

The V4 prefill path goes through it too: the same tokens and keys, read from the caches without a
workspace.

Each token is a batch entry of its own, as vLLM's V4 decode has it. Its main list names slots of the
sliding-window cache, its extra list those of the compressed one; both share one softmax. The kernel
takes 64 or 128 heads and lists whose widths are multiples of 64; others are padded. It knows no
invalid slot but -1: anything else outside a cache is an illegal memory access, so every slot within
a length is looked at first. How keys are split is planned by the first launch for its own lengths,
which nothing checks later: each launch gets a fresh schedule.

lse is natural-log, [b, H, s_q], without the sink, and +inf for a row without a key. No max_logits.
Nothing here touches CUDA before a function is called.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from jaxtyping import BFloat16, Float32, Int32
from torch import Tensor

from torch_ref.arguments import finite_scale, require_device, require_tensor, shape_of
from torch_ref.cuda.decode_batch import contiguous
from torch_ref.cuda.flash_mla_builds import (
    Build,
    Kernel,
    heads_reason,
    pad_heads,
    refusal,
    scale_reason,
)
from torch_ref.decode import DecodeResult
from torch_ref.indices import global_topk_slots, paged_swa_indices, visible_entries
from torch_ref.kv_cache import PagedKV
from torch_ref.prefill.inputs import VALUE_WIDTH
from torch_ref.v4 import V4PrefillResult
from torch_ref.v4.inputs import V4Inputs

WIDTH_MULTIPLE = 64
# A launch keeps fp32 partial results for each of its rows: 512 of 128 heads take some 150 MB.
ROWS_PER_LAUNCH = 512

_FORMAT = "v4-fp8"
_ALIGNMENT = 16
_KERNEL = Kernel(
    "FlashMLA's sparse decode",
    "flash_mla_with_kvcache",
    parameters=(
        "indices",
        "attn_sink",
        "topk_length",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "extra_topk_length",
    ),
    blackwell=True,
    legacy_part="which alone read V4's pages",
)


@dataclass(frozen=True, eq=False)
class SlotList:
    """A cache and each token's slots of it.

    slots int32 [T, K], of which the first topk_length[t] (int32 [T]; all K for None) count; there
    -1 names no key and any other slot must be one of the cache's. What lies behind is garbage.
    """

    cache: PagedKV
    slots: Int32[Tensor, "T K"]
    topk_length: Int32[Tensor, " T"] | None = None


def find_build() -> Build | None:
    """The first importable build with this function, as in flash_mla_adapter; None if none."""
    return _KERNEL.find_build()


def unsupported_reason(
    *,
    kv_format: str | None = None,
    heads: int | None = None,
    sm_scale: float | None = None,
) -> str | None:
    """None, or in a sentence why FlashMLA can't serve this call here; None arguments aren't judged.

    Any page size, window, top-k and compress ratio will do.
    """
    reason = _unservable(kv_format, heads, sm_scale)
    return reason or refusal(_KERNEL.usable_decode_build)


def v4_prefill(inputs: V4Inputs) -> tuple[V4PrefillResult, tuple[str, ...]]:
    """The V4 prefill batch token by token through sparse decode, and what was padded for it.

    inputs are those of check_v4_inputs. out bf16 [T, H, 512] and lse fp32 [T, H], natural-log, stay
    on the device; no row is empty, since a token sees itself. max_logits is None, and there is no
    plan.

    ValueError: a cache that isn't v4-fp8, sm_scale <= 0, a block table that names no page where a
    key lies. NotImplementedError: no CUDA, wrong architecture, no build. What the kernel raises
    comes through.
    """
    main, extra = slot_lists(inputs)
    result, notes = sparse_decode(
        inputs.q, main, inputs.sm_scale, extra=extra, attn_sink=inputs.attn_sink
    )
    return V4PrefillResult(result.out, None, result.lse), notes


def slot_lists(inputs: V4Inputs) -> tuple[SlotList, SlotList | None]:
    """Each token's window and its compressed entries as slots; None where a layer has no entries.

    A list's columns behind its length are -1.
    """
    swa_slots, swa_lengths = paged_swa_indices(
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.swa_block_table,
        page_size=inputs.swa.page_size,
        window=inputs.window,
        image_left=inputs.image_left,
        image_right=inputs.image_right,
        max_image_tokens=inputs.max_image_tokens,
    )
    main = SlotList(inputs.swa, swa_slots, swa_lengths)
    if inputs.compressed is None or inputs.compressed_block_table is None:
        return main, None
    assert inputs.topk_indices is not None
    entries = visible_entries(
        inputs.batch.position, compress_ratio=inputs.compress_ratio, topk=inputs.topk
    )
    if not inputs.tokens or not bool(entries.any()):
        return main, None
    column = torch.arange(inputs.topk, device=entries.device)
    listed = inputs.topk_indices.masked_fill(column >= entries[:, None], -1)
    slots, lengths = global_topk_slots(
        listed,
        inputs.batch.request.int(),
        inputs.compressed_block_table,
        page_size=inputs.compressed.page_size,
    )
    return main, SlotList(inputs.compressed, slots, lengths)


def sparse_decode(
    q: BFloat16[Tensor, "T H 512"],
    main: SlotList,
    sm_scale: float,
    *,
    extra: SlotList | None = None,
    attn_sink: Float32[Tensor, " H"] | None = None,
) -> tuple[DecodeResult, tuple[str, ...]]:
    """One query token each over its main and its extra list: the result, and what was changed.

    q bf16 [T, H, 512], H in 1..128; attn_sink fp32 [H] in natural-log units; sm_scale > 0. out is
    bf16 [T, H, 512]; lse fp32 [T, H], natural-log and -inf for a token without a key, whose out is
    0. A NaN in a key or in q makes out and lse of its rows NaN.

    ValueError: shapes, dtypes or devices that don't fit, caches that aren't v4-fp8 or have no page,
    a slot within its length that is neither -1 nor in the cache, a length outside 0..K. T = 0 is no
    launch. NotImplementedError: no CUDA, wrong architecture, no build.
    """
    require_tensor("q", q, torch.bfloat16)
    if q.ndim != 3 or q.shape[2] != VALUE_WIDTH:
        raise ValueError(f"q: shape {shape_of(q)}; accepted is [T, H, {VALUE_WIDTH}]")
    T, H, _ = q.shape
    scale = finite_scale(sm_scale)
    for listed in (main, extra):
        reason = listed and _unservable(listed.cache.kv_format, H, scale)
        if reason:
            raise ValueError(reason)
    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, torch.float32)
        if attn_sink.shape != (H,):
            raise ValueError(f"attn_sink: shape {shape_of(attn_sink)}; accepted is [H] = [{H}]")
    require_device({"attn_sink": attn_sink}, q.device)
    counts = _check_list("main", main, q)
    if extra is not None:
        counts = counts + _check_list("extra", extra, q)
    build = _KERNEL.usable_decode_build()
    if not T:
        out = q.new_zeros(0, H, VALUE_WIDTH)
        empty = DecodeResult(out, out.new_zeros(0, H, dtype=torch.float32))
        return empty, ("no query token: the kernel wasn't launched",)

    notes: list[str] = []
    q, attn_sink = pad_heads(q, attn_sink, notes)
    q = contiguous("q", q, notes)
    lists = [_for_kernel("main", main, notes)]
    if extra is not None:
        lists.append(_for_kernel("extra", extra, notes))
    if T > ROWS_PER_LAUNCH:
        notes.append(f"{T} tokens in launches of at most {ROWS_PER_LAUNCH}")
    outs, lses = [], []
    for start in range(0, T, ROWS_PER_LAUNCH):
        rows = slice(start, start + ROWS_PER_LAUNCH)
        out, lse = _launch(build, q[rows], [one.rows(rows) for one in lists], scale, attn_sink)
        outs.append(out[:, 0, :H])
        lses.append(lse[:, :H, 0])
    out, lse = torch.cat(outs), torch.cat(lses)
    return _read_lse(out, lse, counts == 0, notes), tuple(notes)


@dataclass(frozen=True, eq=False)
class _KernelList:
    """A slot list as the kernel takes it: pages [n, P, 1, 584], slots [T, 1, K], lengths [T]."""

    pages: Tensor
    slots: Tensor
    lengths: Tensor

    def rows(self, rows: slice) -> _KernelList:
        return _KernelList(self.pages, self.slots[rows], self.lengths[rows])


def _launch(
    build: Build, q: Tensor, lists: list[_KernelList], scale: float, attn_sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kernel's out [b, 1, H, 512] and lse [b, H, 1]."""
    options: dict[str, object] = {}
    if build.takes_use_legacy:
        options["use_legacy"] = True
    if "kv_format" in inspect.signature(build.function).parameters:
        options["kv_format"] = "V4"
    main, *others = lists
    if others:
        (extra,) = others
        options |= {
            "extra_k_cache": extra.pages,
            "extra_indices_in_kvcache": extra.slots,
            "extra_topk_length": extra.lengths,
        }
    schedule, _ = build.module.get_mla_metadata()
    return build.function(
        q[:, None],
        main.pages,
        None,
        None,
        VALUE_WIDTH,
        schedule,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=main.slots,
        topk_length=main.lengths,
        attn_sink=attn_sink,
        **options,
    )


def _check_list(name: str, listed: SlotList, q: Tensor) -> Tensor:
    """How many keys each token's list names; ValueError for what the kernel would trust blindly."""
    cache, slots, length = listed.cache, listed.slots, listed.topk_length
    require_tensor(f"{name} slots", slots, torch.int32)
    T = q.shape[0]
    if slots.ndim != 2 or slots.shape[0] != T:
        raise ValueError(f"{name} slots: shape {shape_of(slots)}; accepted is [{T}, K]")
    K = slots.shape[1]
    if length is not None:
        require_tensor(f"{name} topk_length", length, torch.int32)
        if length.shape != (T,):
            raise ValueError(f"{name} topk_length: shape {shape_of(length)}; accepted is [{T}]")
    require_device(
        {f"{name} cache": cache.cache, f"{name} slots": slots, f"{name} topk_length": length},
        q.device,
    )
    if not cache.num_pages:
        raise ValueError(
            f"{name} cache: 0 pages; accepted are 1 and more, for the kernel reads page 0 in the "
            "place of a slot -1"
        )
    counted = torch.ones_like(slots, dtype=torch.bool)
    if length is not None:
        wrong = (length < 0) | (length > K)
        if bool(wrong.any()):
            t = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name} topk_length: {int(length[t])} for token {t}; accepted are 0 to K = {K}"
            )
        counted = torch.arange(K, device=slots.device) < length[:, None]
    outside = counted & ((slots < -1) | (slots >= cache.num_slots))
    if bool(outside.any()):
        t, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{name} slots: {int(slots[t, column])} in column {column} of token {t}; accepted are "
            f"-1 and slots 0 to {cache.num_slots - 1}: the kernel reads whatever else is named"
        )
    return (counted & (slots >= 0)).sum(1)


def _for_kernel(name: str, listed: SlotList, notes: list[str]) -> _KernelList:
    T, K = listed.slots.shape
    width = max(1, -(-K // WIDTH_MULTIPLE)) * WIDTH_MULTIPLE
    slots, lengths = listed.slots, listed.topk_length
    if width != K:
        slots = torch.cat([slots, slots.new_full((T, width - K), -1)], dim=1)
        notes.append(f"{name} list padded from {K} to {width} slots (-1)")
    if lengths is None:
        lengths = slots.new_full((T,), K)
    return _KernelList(
        _pages(name, listed.cache, notes), slots.contiguous()[:, None], lengths.contiguous()
    )


def _pages(name: str, paged: PagedKV, notes: list[str]) -> Tensor:
    """Views the cache as [pages, P, 1, 584], as the kernel is told.

    It knows that a page is split into data and scales, and takes a page's stride from the tensor.
    """
    cache = paged.cache
    if cache.data_ptr() % _ALIGNMENT or cache.stride(0) % _ALIGNMENT:
        notes.append(f"{name} cache copied: its pages didn't start at multiples of 16 bytes")
        cache = cache.clone(memory_format=torch.contiguous_format)
    token = paged.layout.token_bytes
    return cache.as_strided(
        (paged.num_pages, paged.page_size, 1, token),
        (cache.stride(0), token, token, 1),
        cache.storage_offset(),
    )


def _read_lse(out: Tensor, lse: Tensor, empty: Tensor, notes: list[str]) -> DecodeResult:
    """-inf where no key was listed; NaN where a sum that was NaN came back as an empty row's."""
    lse = lse.masked_fill(empty[:, None] & (lse == math.inf), -math.inf)
    poisoned = out.isnan().any(-1) & (lse == math.inf)
    if count := int(poisoned.sum()):
        notes.append(f"lse +inf read as NaN for {count} rows and heads whose out is NaN")
    return DecodeResult(out, lse.masked_fill(poisoned, math.nan))


def _unservable(kv_format: str | None, heads: int | None, sm_scale: float | None) -> str | None:
    """What no build can serve, wherever it runs."""
    if kv_format is not None and kv_format != _FORMAT:
        return (
            f"kv_format = {kv_format!r}: FlashMLA's sparse decode reads fp8 pages only, and this "
            f"adapter those of {_FORMAT}"
        )
    return heads_reason(heads) or scale_reason(sm_scale)
