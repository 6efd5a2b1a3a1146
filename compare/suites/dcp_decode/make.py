"""Inputs of the suite ``dcp-decode``: the same bytes on every machine.

The keys of a request are made once, by their global positions, and then dealt out to the ranks: a
request has the same keys whatever the world and the interleave are. Each rank lays its keys on
pages in a shuffled order; the block table is the same on all ranks, since a block of it stands for
page * world positions. Slots past a request's keys and pages that no request has are NaN.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.ownership import owned_positions
from compare.generate.streams import Stream, bell, below, raw, rows_of, scaled
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.dcp_decode.case import KEY_WIDTH, DcpDecodeCase
from compare.suites.dcp_decode.exact import exact_keys, exact_q, exact_strength

SPARE_PAGES = 2
STALE_COLUMNS = 2
OUT_OF_RANGE = (1_000_000, -5)

# Power of two that multiplies a bell of standard deviation 37837, for q and kv.
_EXPONENTS = {"normal": (-15, -15), "flat": (-21, -15), "peaked": (-12, -15)}
# What a stored float8 number is multiplied by where a bell is scaled by 2^-15: no powers of two,
# and not one for both, so that taking one for the other shows. At most 4 / scale, 342 and 410 of
# 448, is stored: nothing to clamp. Exact data must be whole numbers of its scale.
_FLOAT8_SCALE = 3 / 256
_FLOAT8_Q_SCALE = 5 / 512
_EXACT_FLOAT8_SCALE = 0.5
_EXACT_STORED_STRENGTH = 256
_NAN_COLUMN = 100

_DTYPES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


def dcp_decode_inputs(case: DcpDecodeCase) -> DcpDecodeInputs:
    """The arguments that a case describes; with rank=all those of one call over all keys, and one
    shard for each rank.
    """
    q = _queries(case)
    keys = _keys(case)
    if case.rank != "all":
        return dataclasses.replace(
            _call(case, q, keys, int(case.rank), case.world, case.interleave), case=case
        )
    return dataclasses.replace(
        _call(case, q, keys, rank=0, world=1, interleave=1),
        shards=tuple(
            _call(case, q, keys, rank, case.world, case.interleave) for rank in range(case.world)
        ),
        case=case,
    )


def _call(
    case: DcpDecodeCase,
    q: np.ndarray,
    keys: list[np.ndarray],
    rank: int,
    world: int,
    interleave: int,
) -> DcpDecodeInputs:
    """One rank's arguments."""
    page = case.page
    blocks = [-(-total // (page * world)) for total in case.lens]
    first = np.cumsum([0, *blocks])
    pages = int(first[-1]) + SPARE_PAGES
    order = np.argsort(raw(case.seed, Stream.PAGES, 0, (pages,)), kind="stable")
    cache = np.full((pages * page, KEY_WIDTH), np.nan, _DTYPES[case.kv])
    width = max((1, *blocks)) + STALE_COLUMNS * case.stale
    table = np.zeros((len(case.lens), width), np.int32)
    lens = np.zeros(len(case.lens), np.int32)
    for request, (values, total) in enumerate(zip(keys, case.lens, strict=True)):
        own = order[first[request] : first[request + 1]]
        owned = owned_positions(total, rank, world, interleave)
        held = owned[: max(0, len(owned) - case.missing)]
        local = np.arange(len(held))
        cache[own[local // page] * page + local % page] = values[held]
        table[request, : len(own)] = own
        lens[request] = len(held)
    if case.stale:
        _put_stale_entries(case, table, -(-lens // page), order)
    return DcpDecodeInputs(
        q=q,
        kv_cache=cache.reshape(pages, page, KEY_WIDTH),
        block_table=table,
        seq_lens=lens,
        query_start_loc=np.cumsum((0, *case.q), dtype=np.int32),
        total_lens=np.array(case.lens, np.int32),
        max_query_len=case.promised,
        sm_scale=case.scale,
        dcp_rank=rank,
        dcp_world=world,
        interleave=interleave,
        causal=case.causal,
        kv_scale=_kv_scale(case),
        q_scale=_q_scale(case),
    )


def _put_stale_entries(
    case: DcpDecodeCase, table: np.ndarray, used: np.ndarray, order: np.ndarray
) -> None:
    """Writes into every entry past a request's keys, in place: a page that doesn't exist, or one
    that a request has.
    """
    words = raw(case.seed, Stream.STALE, 0, (table.size,)).reshape(table.shape)
    kind = (words & np.uint64(3)).astype(np.int64)
    others = order[below(words, len(order) - SPARE_PAGES)] if len(order) > SPARE_PAGES else 0
    garbage = np.where(kind < 2, np.array(OUT_OF_RANGE)[kind & 1], others)
    np.copyto(table, garbage.astype(np.int32), where=np.arange(table.shape[1]) >= used[:, None])


def _queries(case: DcpDecodeCase) -> np.ndarray:
    """[T, H, 576] as they are stored, padded rows NaN."""
    tokens, width = sum(case.q), case.h * KEY_WIDTH
    q = np.full((case.tokens, case.h, KEY_WIDTH), np.nan, _DTYPES[case.q_dtype])
    scale = _q_scale(case)

    def fill(start: int, end: int) -> None:
        if case.data == "exact":
            values = exact_q(case, start, end)
        else:
            words = rows_of(case.seed, Stream.DECODE_Q, start, end, width)
            values = scaled(bell(words), _EXPONENTS[case.data][0])
            values = values.reshape(end - start, case.h, KEY_WIDTH)
        q[start:end] = values if scale is None else values / np.float32(scale)

    in_blocks(fill, tokens, width)
    if case.nan_token is not None:
        q[(*case.nan_token, _NAN_COLUMN)] = np.nan
    return q


def _keys(case: DcpDecodeCase) -> list[np.ndarray]:
    """[T_b, 576] of each request, as they are stored, by global position."""
    return [
        _keys_of(case, request, row)
        for request, row in enumerate(np.cumsum((0, *case.lens))[:-1].tolist())
    ]


def _keys_of(case: DcpDecodeCase, request: int, row: int) -> np.ndarray:
    keys = np.empty((case.lens[request], KEY_WIDTH), _DTYPES[case.kv])
    scale = _kv_scale(case)

    def fill(start: int, end: int) -> None:
        if case.data == "exact":
            values = exact_keys(case, request, row, start, end)
        else:
            words = rows_of(case.seed, Stream.DECODE_KV, row + start, row + end, KEY_WIDTH)
            values = scaled(bell(words), _EXPONENTS[case.data][1])
        keys[start:end] = values if scale is None else values / np.float32(scale)

    in_blocks(fill, len(keys), KEY_WIDTH)
    if case.nan_key is not None and case.nan_key[0] == request:
        keys[case.nan_key[1], _NAN_COLUMN] = np.nan
    return keys


def _kv_scale(case: DcpDecodeCase) -> float | None:
    if case.kv == "bf16":
        return None
    if case.kv_scale != "auto":
        return float(case.kv_scale)
    return _EXACT_FLOAT8_SCALE if case.data == "exact" else _FLOAT8_SCALE


def _q_scale(case: DcpDecodeCase) -> float | None:
    if case.q_dtype == "bf16":
        return None
    if case.data == "exact":
        return exact_strength(case) / _EXACT_STORED_STRENGTH
    return _FLOAT8_Q_SCALE * 2.0 ** (_EXPONENTS[case.data][0] + 15)
