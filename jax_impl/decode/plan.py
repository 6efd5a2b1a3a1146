"""Planning a decode step: what each row sees, and which thread block walks over which keys.

Everything that rank, world, interleave and causality have to say is said here, as one number
per row: how many of its request's local keys it sees. Kernels mask with nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from jax_impl.decode import split
from jax_impl.decode.kernel_sm90 import work
from jax_impl.planning._arguments import (
    INT32_MAX,
    Lengths,
    integer,
    query_offsets,
    sharding,
)
from jax_impl.planning.decode_rows import (
    NO_REQUEST,
    decode_rows,
    local_key_counts,
    per_request,
)

MAX_HEADS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCapacity:
    """The largest batch that a family of plans serves; all of them run one compiled program.

    tokens: query tokens, padding included: the rows of q.
    requests: rows of the block table.
    num_ctas: thread blocks of the GPU kernel; one fits on an SM, and an H200 has 132.
    cluster: thread blocks that share the keys they load, 1 or 2. None: 2 if a request of
      max_query_len tokens has more than one tile of 64 (token, head) rows.
    """

    tokens: int
    requests: int
    num_ctas: int = 132
    cluster: int | None = None

    def __post_init__(self) -> None:
        integer("capacity.tokens", self.tokens, least=0, most=INT32_MAX)
        integer("capacity.requests", self.requests, least=0, most=INT32_MAX)
        integer("capacity.num_ctas", self.num_ctas, least=1, most=INT32_MAX)
        if self.cluster not in (None, 1, 2):
            raise ValueError(f"capacity.cluster: {self.cluster!r}; accepted: 1, 2 or None")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlan:
    """One step's plan: a pytree of int32 arrays. Put it on a device once, use it in each layer.

    row_request: [N] row of the block table that each row of q belongs to; -1 for padding.
    row_keys: [N] how many of its first local keys a row sees; 0 for padding.
    items: [.., cluster, 8] the work list of the GPU kernel (kernel_sm90/work.py).
    first_item: [workers + 2] where the items of each thread block (or cluster) start, those of
      rows that see no key, and the end.
    merges: [.., 4] tiles whose keys were split; empty if none can be.
    num_requests: rows that the block table must have.
    heads: heads that q must have.
    interleave: a page must hold a multiple of so many keys.
    num_partials: unfinished tiles that there is room for.
    """

    row_request: Int32[Any, " N"]
    row_keys: Int32[Any, " N"]
    items: Int32[Any, "I C 8"]
    first_item: Int32[Any, " C2"]
    merges: Int32[Any, "M 4"]
    num_requests: int = dataclasses.field(metadata={"static": True})
    heads: int = dataclasses.field(metadata={"static": True})
    interleave: int = dataclasses.field(metadata={"static": True})
    num_partials: int = dataclasses.field(metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """N, tokens with padding."""
        return self.row_keys.shape[0]

    @property
    def cluster(self) -> int:
        return self.items.shape[1]


def plan_decode(
    query_start_loc: Lengths,
    seq_lens: Lengths,
    total_lens: Lengths,
    *,
    max_query_len: int,
    heads: int,
    dcp_rank: int = 0,
    dcp_world: int = 1,
    interleave: int = 1,
    causal: bool = True,
    capacity: DecodeCapacity | None = None,
    split_keys: int | None = None,
) -> DecodePlan:
    """Plan one decode step of one rank, on the host.

    The rules are those of `planning.decode_rows` and `planning.local_key_counts`; ragged and
    uniform batches are planned alike.

    Args:
      query_start_loc: [B + 1] offsets of the requests' query tokens, from 0; without padding.
        A request may have any number of them, 0 included.
      seq_lens: [B] keys of each request that this rank holds (`planning.local_seq_lens`).
      total_lens: [B] global length of each request, this step's tokens included.
      max_query_len: most query tokens that a request may have in this step, >= 1.
      heads: query heads that the kernel runs, 1 to 128.
      dcp_rank, dcp_world, interleave: this rank's place, and runs of how many positions.
      causal: whether a token is barred from its request's later tokens.
      capacity: plans of one capacity (with one max_query_len, heads and interleave) have arrays
        of one shape, so that a jitted `dcp_decode` is compiled once. None: as large as this
        batch.
      split_keys: None cuts requests so that the GPU is evenly loaded, which depends on the whole
        batch. A multiple of 128 cuts every request at its multiples instead: then the bits of
        a row depend on its own query and keys alone.

    Returns:
      DecodePlan of NumPy arrays.

    Raises:
      ValueError: lengths that are not one per request, or out of range; a rank outside the
        world; a request of more than max_query_len tokens; a batch larger than the capacity, or
        a capacity that is no DecodeCapacity; a row that sees more keys, or more (token, head)
        rows (heads rounded up to a multiple of 8), than an int32 holds.
      NotImplementedError: more than 128 heads, or split_keys together with a capacity.
    """
    rank, world, run = sharding(dcp_rank, dcp_world, interleave)
    num_heads = integer("heads", heads, least=1)
    if num_heads > MAX_HEADS:
        raise NotImplementedError(f"heads: {num_heads}; accepted: 1 to {MAX_HEADS}")
    token_rows = work.rows_of_token(num_heads)
    if split_keys is not None:
        _check_split(split_keys, capacity)

    rows = decode_rows(query_start_loc, total_lens, max_query_len=max_query_len, causal=causal)
    held = per_request("seq_lens", seq_lens, len(query_offsets(query_start_loc)) - 1)
    keys = local_key_counts(rows, held, dcp_rank=rank, dcp_world=world, interleave=run)
    if len(keys) and (most := keys.max()) > INT32_MAX:
        request = rows.request[keys.argmax()]
        raise ValueError(
            f"seq_lens[{request}]: {held[request]}, of which a row sees {most}; accepted: rows "
            f"that see at most {INT32_MAX} keys"
        )
    if capacity is not None and not isinstance(capacity, DecodeCapacity):
        raise ValueError(f"capacity: {capacity!r}; accepted: a DecodeCapacity, or None")
    room = capacity or DecodeCapacity(tokens=len(keys), requests=len(held))
    if room.tokens * token_rows > INT32_MAX:
        name = "query_start_loc" if capacity is None else "capacity"
        raise ValueError(
            f"{name}: {room.tokens} tokens of {token_rows} rows each; accepted: at most "
            f"{INT32_MAX} rows"
        )
    if len(keys) > room.tokens or len(held) > room.requests:
        raise ValueError(
            f"capacity: {room.tokens} tokens, {room.requests} requests; accepted: at least this "
            f"batch's {len(keys)} tokens and {len(held)} requests"
        )
    padding = (0, room.tokens - len(keys))
    keys = np.pad(keys, padding)
    request = np.pad(rows.request, padding, constant_values=NO_REQUEST)
    offsets = query_offsets(query_start_loc)
    cluster = room.cluster
    if cluster is None and capacity is not None:
        cluster = 2 if max_query_len * token_rows > work.TILE_ROWS else 1
    if cluster is None:
        cluster = _best_cluster(np.diff(offsets), token_rows)
    workers = max(1, room.num_ctas // cluster)

    seen = keys.tolist()
    units = _units(offsets, seen, token_rows, cluster)
    units.sort(key=lambda unit: unit.num_pairs == 0)
    pairs = [unit.num_pairs for unit in units if unit.num_pairs]
    if split_keys is None:
        pieces = split.deal(pairs, workers)
    else:
        pieces = split.deal_fixed(pairs, workers, split_keys // work.PAIR_KEYS)
    # Rows that see no key stand behind all others; the kernel shares them out by itself.
    nothing = [split.Piece(workers, unit, 0, 0) for unit in range(len(pairs), len(units))]
    pieces += nothing
    items, merges, num_partials = _items(units, pieces, seen, token_rows, cluster)
    first_item = np.searchsorted([piece.worker for piece in pieces], np.arange(workers + 2))
    if capacity is not None:
        # Each worker but the last may cut one unit, and so has at most two cut ones.
        items = _filled_up(items, _most_units(room, token_rows, cluster) + workers)
        merges = _filled_up(merges, workers * cluster)
        num_partials = 2 * workers * cluster
    return DecodePlan(
        row_request=request.astype(np.int32),
        row_keys=keys.astype(np.int32),
        items=items,
        first_item=first_item.astype(np.int32),
        merges=merges,
        num_requests=room.requests,
        heads=num_heads,
        interleave=run,
        num_partials=num_partials,
    )


class _Unit(NamedTuple):
    """Up to `cluster` tiles of rows of one request, which walk over the same keys."""

    request: int
    first_row: int
    num_rows: int
    end: int  # most keys that a row of it sees

    @property
    def num_pairs(self) -> int:
        return -(-self.end // work.PAIR_KEYS)

    def tiles(self, cluster: int) -> list[tuple[int, int]]:
        """First row and number of rows of each thread block's tile; some may have none."""
        return [
            (self.first_row + skipped, max(0, min(work.TILE_ROWS, self.num_rows - skipped)))
            for skipped in range(0, work.TILE_ROWS * cluster, work.TILE_ROWS)
        ]


def _units(
    offsets: Sequence[int], seen: Sequence[int], token_rows: int, cluster: int
) -> list[_Unit]:
    """Every row is in exactly one unit; those of padding are in units without keys."""
    spans = [(request, *tokens) for request, tokens in enumerate(pairwise(offsets))]
    spans.append((0, offsets[-1], len(seen)))
    step = work.TILE_ROWS * cluster
    units = []
    for request, start, end in spans:
        for first in range(start * token_rows, end * token_rows, step):
            rows = min(step, end * token_rows - first)
            # A later token of a request sees no less than an earlier one.
            units.append(_Unit(request, first, rows, seen[(first + rows - 1) // token_rows]))
    return units


def _items(
    units: Sequence[_Unit],
    pieces: Sequence[split.Piece],
    seen: Sequence[int],
    token_rows: int,
    cluster: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The items in the order of the pieces, the merges, and the number of partial results."""
    first_pairs: dict[int, list[int]] = {}
    for piece in pieces:
        first_pairs.setdefault(piece.unit, []).append(piece.first_pair)
    merges: list[tuple[int, ...]] = []
    ordinal: dict[tuple[int, int], int] = {}  # partial result of a piece's first tile
    num_partials = 0
    for unit, firsts in first_pairs.items():
        if len(firsts) == 1:
            continue
        for number, first_pair in enumerate(sorted(firsts)):
            ordinal[unit, first_pair] = num_partials + number
        for first_row, rows in units[unit].tiles(cluster):
            if rows:
                merges.append((first_row, rows, num_partials, num_partials + len(firsts)))
                num_partials += len(firsts)

    items = []
    for piece in pieces:
        unit, count = units[piece.unit], len(first_pairs[piece.unit])
        for tile, (first_row, rows) in enumerate(unit.tiles(cluster)):
            full, partial = unit.end, -1
            if rows:
                full = seen[first_row // token_rows]
            if rows and count > 1:
                partial = ordinal[piece.unit, piece.first_pair] + tile * count
            items.append(
                (
                    first_row if rows else unit.first_row,
                    rows,
                    unit.request,
                    piece.first_pair,
                    piece.num_pairs,
                    unit.end,
                    full,
                    partial,
                )
            )
    return (
        np.asarray(items, np.int32).reshape(-1, cluster, work.ITEM_FIELDS),
        np.asarray(merges, np.int32).reshape(-1, work.MERGE_FIELDS),
        num_partials,
    )


def _best_cluster(query_lens: np.ndarray, token_rows: int) -> int:
    """2 if more tiles would find a neighbour of their request than would idle beside none."""
    tiles = -(-query_lens * token_rows // work.TILE_ROWS)
    return 2 if (tiles // 2 * 2).sum() > (tiles % 2).sum() else 1


def _most_units(room: DecodeCapacity, token_rows: int, cluster: int) -> int:
    """Full units, one that isn't for each request with tokens, and one for padding."""
    full = room.tokens * token_rows // (work.TILE_ROWS * cluster)
    return full + min(room.requests, room.tokens) + 1


def _filled_up(array: np.ndarray, length: int) -> np.ndarray:
    assert len(array) <= length, (array.shape, length)
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))


def _check_split(split_keys: Any, capacity: DecodeCapacity | None) -> None:
    count = integer("split_keys", split_keys, least=1)
    if count % work.PAIR_KEYS:
        raise ValueError(f"split_keys: {count}; accepted: a multiple of {work.PAIR_KEYS}, or None")
    if capacity is not None:
        raise NotImplementedError(
            f"split_keys: {count} with a capacity; accepted: None, since the number of partial "
            "results then has no bound that a capacity states"
        )
