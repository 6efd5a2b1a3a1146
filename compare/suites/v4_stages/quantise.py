"""The stage that writes tokens to a paged cache: its arguments, and the bytes that are due.

A group's scale is 2^e with e = ceil(log2(amax / 448)), amax being at least a floor; its codes are
x / 2^e, clamped to +-448 and rounded to the nearest float8_e4m3fn. Other columns are rounded to
bfloat16, the byte of padding is 0. A slot of -1 is skipped, and every other byte stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from compare.generate import wide_tokens
from compare.generate.lists import positions
from compare.generate.pages import held_tokens, lay_out
from compare.generate.streams import Stream, bell, below, rows_of
from compare.generate.v4_batch import WIDTH, V4Batch
from compare.suites.v4_stages.call import Argument
from compare.suites.v4_stages.case import V4StagesCase
from compare.suites.v4_stages.slot_lists import slot_mapping

_DRAWN_GROUP = 64
_LARGEST = 448.0
_BIAS = 127

# By format: columns of a group, groups, the least amax.
_GROUPS = {"v4-fp8": (64, 7, 1e-4), "v3.2-fp8": (128, 4, 448e-4)}


def arguments(case: V4StagesCase, batch: V4Batch) -> dict[str, Argument]:
    """The batch's tokens are written; what stands in the cache before is NaN as a number."""
    layout = lay_out(batch, held_tokens(batch, compressed=False), compressed=False)
    request, position = positions(batch)
    pages = layout.block_table[request, position // batch.page].astype(np.int64)
    slots = pages * batch.page + position % batch.page
    width = wide_tokens.WIDTH if batch.format in wide_tokens.FORMATS else WIDTH
    return {
        "cache": layout.cache.array,
        "page_size": batch.page,
        "kv_format": batch.format,
        "values": _drawn_values(batch.seed, batch.tokens, width),
        "slot_mapping": slot_mapping(case, slots),
    }


def _drawn_values(seed: int, tokens: int, width: int) -> np.ndarray:
    """[T, width] float32. Of 64 columns each, a bell of 18 bits, or of 7 (ties when rounded), or
    whole numbers whose largest is 448; all times 2^-16 to 2^7. Others are 0, or below each floor.
    """
    shape = (tokens, width // _DRAWN_GROUP, _DRAWN_GROUP)
    numbers = bell(rows_of(seed, Stream.V4_VALUES, 0, tokens, width)).reshape(shape)
    words = rows_of(seed, Stream.V4_VALUE_KINDS, 0, tokens, shape[1])
    kind, exponent = (words & np.uint64(7))[..., None], (below(words, 24) - 16)[..., None]
    full = numbers * (kind > 3) + (numbers >> 11) * (kind == 3) + (numbers >> 9) * (kind == 2)
    full += numbers * (kind == 1)
    full[..., :1] = np.where(kind == 2, int(_LARGEST), full[..., :1])
    power = np.where(kind > 3, exponent - 17, np.where(kind == 1, -40, exponent))
    return np.ldexp(full.astype(np.float32), power).reshape(tokens, width)


def due(given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The cache with the tokens in it."""
    return {"cache": written_cache(given)}


def accepted(given: Mapping[str, Any], found: np.ndarray) -> dict[str, np.ndarray]:
    """What is due beside a result: where a group's amax is 448 * 2^n, engines may take 2^(n + 1)
    for its scale, so that is due where it was found.
    """
    if given["kv_format"] not in _GROUPS:
        return due(given)
    _, edges = _exponents(given)
    higher = written_cache(given, raised=np.ones_like(edges))
    first, stride, size = _regions(given["kv_format"], given["page_size"])["scales"]
    raised, width = np.zeros_like(edges), size // edges.shape[1]
    for token, slot in enumerate(given["slot_mapping"].tolist()):
        page, offset = divmod(slot, given["page_size"])
        for group in np.flatnonzero(edges[token]) if slot >= 0 else ():
            start = first + offset * stride + group * width
            place = (page, slice(start, start + width))
            raised[token, group] = (found[place] == higher[place]).all()
    return {"cache": written_cache(given, raised=raised)}


def written_cache(
    given: Mapping[str, Any],
    *,
    floor: float | None = None,
    raised: np.ndarray | None = None,
    lowered: bool = False,
) -> np.ndarray:
    """The cache with the tokens in it. floor: in the place of the format's. raised: which groups'
    scales are twice as large where amax is 448 * 2^n. lowered: e is rounded down.
    """
    values, kv_format = given["values"], given["kv_format"]
    if kv_format not in _GROUPS:
        raw = values.astype(ml_dtypes.bfloat16).view(np.uint8)
        return _placed(given, {"raw": raw}).view(ml_dtypes.bfloat16).reshape(given["cache"].shape)
    group, groups, _ = _GROUPS[kv_format]
    exponent, edge = _exponents(given, floor)
    if raised is not None:
        exponent = exponent + (edge & raised)
    if lowered:
        exponent = exponent - ~edge
    exponent = np.clip(exponent, -_BIAS, _BIAS + 1)
    columns = group * groups
    nope = values[:, :columns].astype(np.float64).reshape(-1, groups, group)
    scaled = np.clip(np.ldexp(nope, -exponent[..., None]), -_LARGEST, _LARGEST)
    codes = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).reshape(-1, columns)
    if kv_format == "v4-fp8":
        scales = (exponent + _BIAS).astype(np.uint8)
    else:
        scales = np.ldexp(1.0, exponent).astype(np.float32).view(np.uint8)
    return _placed(
        given,
        {
            "codes": codes.view(np.uint8),
            "scales": scales,
            "raw": values[:, columns:].astype(ml_dtypes.bfloat16).view(np.uint8),
            "padding": np.zeros((len(values), 1), np.uint8),
        },
    )


def token_of_each_byte(given: Mapping[str, Any]) -> np.ndarray:
    """int64, as the cache's bytes [pages, stride]: the token that is written there, or -1."""
    numbers = np.arange(len(given["values"]))[:, None]
    fields: dict[str, np.ndarray] = {
        name: numbers for name in ("codes", "scales", "raw", "padding")
    }
    before = np.full(_bytes_of(given["cache"]).shape, -1, np.int64)
    return _placed(given, fields, before)


def _exponents(
    given: Mapping[str, Any], floor: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each group's e, and where amax is 448 * 2^n: float64 divides by 448 exactly there alone."""
    group, groups, least = _GROUPS[given["kv_format"]]
    nope = given["values"][:, : group * groups].astype(np.float64).reshape(-1, groups, group)
    amax = np.maximum(np.abs(nope).max(axis=-1), least if floor is None else floor)
    mantissa, exponent = np.frexp(amax / _LARGEST)
    edge = mantissa == 0.5
    return exponent.astype(np.int64) - edge, edge


def _bytes_of(cache: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(cache).view(np.uint8).reshape(len(cache), -1)


def _regions(kv_format: str, page_size: int) -> dict[str, tuple[int, int, int]]:
    """Of each field its first byte on a page, bytes from one token to the next, and its size."""
    return {
        "v4-fp8": {
            "codes": (0, 576, 448),
            "raw": (448, 576, 128),
            "scales": (page_size * 576, 8, 7),
            "padding": (page_size * 576 + 7, 8, 1),
        },
        "v3.2-fp8": {"codes": (0, 656, 512), "scales": (512, 656, 16), "raw": (528, 656, 128)},
        "bf16": {"raw": (0, 1024, 1024)},
        "bf16-576": {"raw": (0, 1152, 1152)},
    }[kv_format]


def _placed(
    given: Mapping[str, Any], fields: Mapping[str, np.ndarray], before: np.ndarray | None = None
) -> np.ndarray:
    """The bytes [pages, stride] with each token's fields [N, size or 1] in them."""
    stored = (_bytes_of(given["cache"]) if before is None else before).copy()
    kept = given["slot_mapping"] >= 0
    page, offset = np.divmod(given["slot_mapping"][kept].astype(np.int64), given["page_size"])
    regions = _regions(given["kv_format"], given["page_size"])
    for name, (first, stride, size) in regions.items():
        place = first + offset[:, None] * stride + np.arange(size)
        stored[page[:, None], place] = fields[name][kept]
    return stored
