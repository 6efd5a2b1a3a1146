"""Inputs of the suite ``dcp-sparse``: the same bytes on every machine.

The keys of a request are made once, by their global positions, and then dealt out to the ranks.
The block table is the same on all ranks, since a block of it stands for page * world positions.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import ml_dtypes
import numpy as np

from compare.generate.lists import drawn_lists, token_positions
from compare.generate.ownership import local_length, owned_positions
from compare.generate.pages import lay_out_spans
from compare.generate.streams import Stream, bell, rows_of, scaled
from compare.suites.dcp_sparse.call import DcpSparseInputs
from compare.suites.dcp_sparse.case import WIDTH, DcpSparseCase
from compare.suites.dcp_sparse.exact import exact_keys, exact_q, key_groups


def dcp_sparse_inputs(case: DcpSparseCase) -> DcpSparseInputs:
    """The arguments of the one call over all keys, and one shard for each rank."""
    request, position = token_positions(case.lens, case.q)
    seen = np.maximum(position + 1, 0)
    lists = drawn_lists(
        seen, np.minimum(seen, case.topk), case.topk, case.seed,
        picks=Stream.PICK, order=Stream.ORDER,
    )  # fmt: skip
    first = np.cumsum((0, *case.lens))
    chosen = np.zeros(first[-1], bool)
    rows = lists + first[request, None]  # of all keys, one request's after another
    chosen[rows[lists >= 0]] = True
    keys = _values(case, Stream.DECODE_KV, len(chosen), 1)[:, 0]
    q = _values(case, Stream.DECODE_Q, len(request), case.h)
    if case.data == "exact":
        keys = exact_keys(case, len(chosen))
        q = exact_q(case, np.where(lists >= 0, key_groups(case, len(chosen))[rows], -1))
    keys[~chosen] = np.nan
    shares = [keys[start:end] for start, end in pairwise(first)]

    def call(rank: int, world: int, interleave: int) -> DcpSparseInputs:
        cache, table = _cache(case, shares, rank, world, interleave)
        return DcpSparseInputs(
            q=q,
            kv_cache=cache,
            block_table=table,
            token_to_request=request.astype(np.int32),
            topk_positions=lists,
            sm_scale=case.scale,
            dcp_rank=rank,
            dcp_world=world,
            interleave=interleave,
        )

    shards = tuple(call(rank, case.world, case.interleave) for rank in range(case.world))
    return dataclasses.replace(call(0, 1, 1), shards=shards, case=case)


def _values(case: DcpSparseCase, stream: Stream, rows: int, heads: int) -> np.ndarray:
    """[rows, heads, 512] bfloat16."""
    words = rows_of(case.seed, stream, 0, rows, heads * WIDTH)
    return scaled(bell(words), -15).astype(ml_dtypes.bfloat16).reshape(rows, heads, WIDTH)


def _cache(
    case: DcpSparseCase, keys: list[np.ndarray], rank: int, world: int, interleave: int
) -> tuple[np.ndarray, np.ndarray]:
    """A rank's kv_cache and block_table. keys: of each request, by global position."""
    # Rank 0 has the most keys of a request; the others have as many pages.
    spans = [(0, local_length(total, 0, world, interleave)) for total in case.lens]
    streams = Stream.PAGES, Stream.STALE
    layout = lay_out_spans(spans, case.page, "bf16", case.seed, streams, poison=True)
    for pages, values in zip(layout.block_table, keys, strict=True):
        owned = owned_positions(len(values), rank, world, interleave)
        local = np.arange(len(owned))
        layout.cache.array[pages[local // case.page], local % case.page] = values[owned]
    return layout.cache.array, layout.block_table
