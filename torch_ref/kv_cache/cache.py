"""A paged cache and its single tokens: made, written, read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import BFloat16, Bool, Float, Int, UInt8
from torch import Tensor

from torch_ref.arguments import require_tensor, shape_of
from torch_ref.kv_cache.codec import EncodedRows, decode, encode, stored_scales
from torch_ref.kv_cache.formats import KVFormat, Region, find_format

# A row decodes through float64: this many at a time take some 60 MB.
_ROWS = 16384


@dataclass(frozen=True, eq=False)
class PagedKV:
    """A cache of pages of page_size tokens (P); token `page * P + offset` is called a slot.

    cache: uint8 [pages, page stride in bytes] for v4-fp8 and v3.2-fp8, bf16 [pages, P, D] for bf16
    (D = 512) and bf16-576. The page stride is the format's `page_bytes(P)`; P is never inferred
    from it. Pages may lie apart (any stride of the first axis); a page is contiguous.

    ValueError names what doesn't fit, what it was and what is accepted.
    """

    cache: UInt8[Tensor, "pages stride"] | BFloat16[Tensor, "pages P D"]
    page_size: int
    kv_format: str

    def __post_init__(self) -> None:
        layout, P = find_format(self.kv_format), self.page_size
        if isinstance(P, bool) or not isinstance(P, int) or P < 1:
            raise ValueError(f"page_size: {P!r}; accepted are 1 and more tokens")
        fp8 = layout.codes is not None
        require_tensor("cache", self.cache, torch.uint8 if fp8 else torch.bfloat16)
        page = (layout.page_bytes(P),) if fp8 else (P, layout.columns)
        shape = tuple(self.cache.shape)
        if len(shape) != 1 + len(page) or shape[1:] != page:
            raise ValueError(
                f"cache: shape {list(shape)}; accepted is {['pages', *page]} for "
                f"{self.kv_format} with pages of {P}"
            )
        if self.num_pages and not self.cache[0].is_contiguous():
            raise ValueError(
                f"cache: strides {list(self.cache.stride())}; accepted are pages that are "
                "contiguous each"
            )

    @property
    def layout(self) -> KVFormat:
        return find_format(self.kv_format)

    @property
    def num_pages(self) -> int:
        return self.cache.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def d(self) -> int:
        """Values of a token."""
        return self.layout.columns

    def region(self, region: Region) -> UInt8[Tensor, "pages P size"]:
        """The bytes of one region of every token, as a view of the cache."""
        stored = self.cache.view(torch.uint8)
        return stored.as_strided(
            (self.num_pages, self.page_size, region.size),
            (stored.stride(0), region.stride, 1),
            stored.storage_offset() + region.start(self.page_size),
        )

    def on(self, device: torch.device | str | None) -> PagedKV:
        """The same cache on `device`; None leaves it where it is."""
        return self if device is None else replace(self, cache=self.cache.to(device))


def empty_cache(
    kv_format: str,
    *,
    num_pages: int,
    page_size: int,
    fill: int = 0,
    device: torch.device | str | None = None,
) -> PagedKV:
    """A cache every byte of which is `fill` (0..255); 0xFF is NaN as a code, a scale and bf16."""
    layout = find_format(kv_format)
    if isinstance(num_pages, bool) or not isinstance(num_pages, int) or num_pages < 0:
        raise ValueError(f"num_pages: {num_pages!r}; accepted are 0 and more")
    if not 0 <= fill <= 255:
        raise ValueError(f"fill: {fill}; accepted are the bytes 0 to 255")
    size = layout.page_bytes(max(page_size, 1))
    cache = torch.full((num_pages, size), fill, dtype=torch.uint8, device=device)
    if layout.codes is None:
        cache = cache.view(torch.bfloat16).reshape(num_pages, page_size, layout.columns)
    return PagedKV(cache, page_size, kv_format)


def insert_kv(
    paged: PagedKV, values: Float[Tensor, "N D"], slot_mapping: Int[Tensor, " N"]
) -> PagedKV:
    """A copy of the cache with the rows of `values` written to their slots.

    values bf16 or fp32 [N, D]; slot_mapping int32 or int64 [N], -1 skips a row. Quantised columns
    go through the format's encoder, the others are rounded to bf16; the pad byte of a written
    token is 0, every other byte of the cache stays as it was.

    ValueError: shapes and dtypes that don't fit, a slot below -1 or past the cache, a slot given
    twice, a value that can't be quantised.
    """
    layout = paged.layout
    require_tensor("values", values, torch.bfloat16, torch.float32)
    if values.ndim != 2 or values.shape[1] != layout.columns:
        raise ValueError(f"values: shape {shape_of(values)}; accepted is [N, {layout.columns}]")
    require_tensor("slot_mapping", slot_mapping, torch.int32, torch.int64)
    if slot_mapping.shape != values.shape[:1]:
        raise ValueError(
            f"slot_mapping: shape {shape_of(slot_mapping)}; values has {len(values)} rows, one "
            "slot each is needed"
        )
    for name, tensor in (("values", values), ("slot_mapping", slot_mapping)):
        if tensor.device != paged.cache.device:
            raise ValueError(f"{name}: on {tensor.device}; the cache is on {paged.cache.device}")
    kept = slot_mapping != -1
    slots = slot_mapping[kept].long()
    _require_slots("slot_mapping", slots, paged, also=" and -1")
    if len(slots.unique()) < len(slots):
        counts = torch.bincount(slots)
        raise ValueError(
            f"slot_mapping: slot {int(counts.argmax())} is given {int(counts.max())} times; "
            "accepted is one row for each slot"
        )
    written = replace(paged, cache=paged.cache.clone(memory_format=torch.contiguous_format))
    page, offset = slots // paged.page_size, slots % paged.page_size
    rows = encode(values[kept], layout)
    written.region(layout.raw)[page, offset] = rows.raw
    if layout.codes is not None and layout.scales is not None:
        assert rows.codes is not None and rows.scales is not None
        written.region(layout.codes)[page, offset] = rows.codes
        written.region(layout.scales)[page, offset] = rows.scales
    if layout.padding is not None:
        written.region(layout.padding)[page, offset] = 0
    return written


def read_kv(paged: PagedKV, slots: Int[Tensor, "..."]) -> BFloat16[Tensor, "... D"]:
    """The tokens in these slots, dequantised to bf16; ValueError for a slot outside the cache.

    slots int32 or int64, any shape. Addresses are (page, offset) pairs in 64 bits.
    """
    require_tensor("slots", slots, torch.int32, torch.int64)
    if slots.device != paged.cache.device:
        raise ValueError(f"slots: on {slots.device}; the cache is on {paged.cache.device}")
    flat = slots.flatten().long()
    _require_slots("slots", flat, paged)
    rows = torch.empty(len(flat), paged.d, dtype=torch.bfloat16, device=flat.device)
    for start in range(0, len(flat), _ROWS):
        block = flat[start : start + _ROWS]
        rows[start : start + _ROWS] = decode(_kept(paged, block), paged.layout)
    return rows.unflatten(0, slots.shape) if slots.ndim != 1 else rows


def divergent_scales(paged: PagedKV, slots: Int[Tensor, " N"]) -> Bool[Tensor, "N g"]:
    """Which group scales of these tokens readers disagree on: those that are no power of two.

    An fp32 scale is used as it is by the gather, rounded to bf16 by FlashMLA's Hopper decode, and
    forced through UE8M0 by other readers. UE8M0 scales and bf16 formats (g = 0) have none.
    """
    layout = paged.layout
    require_tensor("slots", slots, torch.int32, torch.int64)
    _require_slots("slots", slots.long(), paged)
    rows = _kept(paged, slots.long())
    if rows.scales is None:
        return torch.zeros(len(slots), 0, dtype=torch.bool, device=slots.device)
    scales = stored_scales(rows.scales, layout)
    if layout.scale_kind == "ue8m0":
        return torch.zeros_like(scales, dtype=torch.bool)
    mantissa, _ = torch.frexp(scales)
    return mantissa != 0.5


def _kept(paged: PagedKV, slots: Tensor) -> EncodedRows:
    layout = paged.layout
    page, offset = slots // paged.page_size, slots % paged.page_size
    raw = paged.region(layout.raw)[page, offset]
    if layout.codes is None or layout.scales is None:
        return EncodedRows(raw)
    codes, scales = (paged.region(r)[page, offset] for r in (layout.codes, layout.scales))
    return EncodedRows(raw, codes, scales)


def _require_slots(name: str, slots: Tensor, paged: PagedKV, also: str = "") -> None:
    outside = (slots < 0) | (slots >= paged.num_slots)
    if bool(outside.any()):
        raise ValueError(
            f"{name}: {int(slots[outside][0])}; accepted are slots 0 to {paged.num_slots - 1}{also}"
        )
