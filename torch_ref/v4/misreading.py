"""Stored tokens of a V4 cache, read rightly or by a reader with a wrong idea of the page.

Bytes are fetched one address at a time from the cache as one stretch, so that a wrong address gives
what really lies there: another token's bytes, the page's padding, the next page.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import BFloat16, Bool, Int64, UInt8
from torch import Tensor

from torch_ref.kv_cache import PagedKV
from torch_ref.kv_cache.codec import decode_e4m3, ue8m0_scales
from torch_ref.kv_cache.formats import KVFormat
from torch_ref.v4.inputs import V4Inputs

Reading = Literal[
    "right",
    "next_scales",
    "previous_scales",
    "interleaved",
    "unpadded_stride",
    "groups_of_128",
    "scales_ignored",
]
"""Of v4-fp8: the scales of the token after or before; tokens of 584 bytes, codes, bf16 and scales
side by side; pages that follow one another without padding; a scale for 128 columns; no scales.
"""

_UNREADABLE = 0xFF  # NaN as a code, a scale and bf16


def read_keys(
    inputs: V4Inputs, keys: Int64[Tensor, "k 3"], reading: Reading
) -> tuple[BFloat16[Tensor, "k 512"], Bool[Tensor, " k"]]:
    """Reads and dequantises keys, and says which of them there are; the others are NaN.

    keys are (0 for compressed and 1 for the window, request, entry or position). There are none of
    another kind, nor where the block table or the cache has no place for one.
    """
    rows = torch.full((len(keys), inputs.swa.d), torch.nan, dtype=torch.bfloat16)
    there = torch.zeros(len(keys), dtype=torch.bool)
    for kind, paged, table in (
        (0, inputs.compressed, inputs.compressed_block_table),
        (1, inputs.swa, inputs.swa_block_table),
    ):
        if paged is None or table is None:
            continue
        table = table.cpu().long()
        request, number = keys[:, 1], keys[:, 2]
        column = number // paged.page_size
        known = (keys[:, 0] == kind) & (number >= 0) & (column < table.shape[1])
        page = torch.full_like(number, -1)
        page[known] = table[request[known], column[known]]
        known &= (page >= 0) & (page < paged.num_pages)
        at = known.nonzero()[:, 0]
        device = paged.cache.device
        offset = number[at] % paged.page_size
        rows[at] = _decode(paged, page[at].to(device), offset.to(device), reading).cpu()
        there |= known
    return rows.to(inputs.q.device), there


def _decode(
    paged: PagedKV, page: Int64[Tensor, " k"], offset: Int64[Tensor, " k"], reading: Reading
) -> BFloat16[Tensor, "k 512"]:
    layout, P = paged.layout, paged.page_size
    if layout.codes is None or layout.scales is None:
        return paged.cache[page, offset]
    stored = paged.cache.contiguous().flatten()
    stride = layout.page_bytes(P) if reading != "unpadded_stride" else P * layout.token_bytes
    if reading == "interleaved":
        first = page * stride + offset * layout.token_bytes
        codes, raw = first, first + layout.codes.size
        scales = raw + layout.raw.size
    else:
        step = {"next_scales": 1, "previous_scales": -1}.get(reading, 0)
        codes, raw, scales = (
            page * stride + region.start(P) + token * region.stride
            for region, token in (
                (layout.codes, offset),
                (layout.raw, offset),
                (layout.scales, offset + step),
            )
        )
    factors = _factors(_bytes(stored, scales, layout.scales.size), layout, reading)
    values = decode_e4m3(_bytes(stored, codes, layout.codes.size))
    values = values.unflatten(1, (layout.groups, layout.group)) * factors[..., None]
    rope = _bytes(stored, raw, layout.raw.size).view(torch.bfloat16)
    return torch.cat([values.float().bfloat16().flatten(1), rope], dim=1)


def _factors(scales: UInt8[Tensor, "k g"], layout: KVFormat, reading: Reading) -> Tensor:
    """What each group of codes is multiplied by, float64 [k, g]."""
    if reading == "scales_ignored":
        return torch.ones(scales.shape, dtype=torch.float64, device=scales.device)
    factors = ue8m0_scales(scales)
    if reading == "groups_of_128":
        return factors[:, torch.arange(layout.groups, device=scales.device) // 2]
    return factors


def _bytes(
    stored: UInt8[Tensor, " bytes"], start: Int64[Tensor, " k"], size: int
) -> UInt8[Tensor, "k size"]:
    address = start[:, None] + torch.arange(size, device=start.device)
    there = (address >= 0) & (address < len(stored))
    read = stored[address.clamp(0, len(stored) - 1)]
    return read.masked_fill(~there, _UNREADABLE)
