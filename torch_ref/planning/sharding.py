"""Which rank of a decode-context-parallel group holds which key, and at what place.

Positions are dealt out in runs of I (the interleave) to the W ranks in turn, so a stripe of I * W
positions gives each rank I keys, and a rank's keys keep their order. Smallest example: W = 2,
I = 2 gives rank 0 the positions 0 1 4 5 8 9 .. and rank 1 the positions 2 3 6 7 10 11 ..

Because the order is kept, the keys below a global bound are a prefix of every rank's keys: a rank
masks with a count, whatever W and I are. Rules: vLLM 0.33.0, vllm/v1/attention/backends/utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from torch_ref.planning._arguments import at_least, lengths


def local_seq_lens(
    total_lens: Sequence[SupportsIndex], *, dcp_rank: int, dcp_world: int, interleave: int = 1
) -> tuple[int, ...]:
    """Keys of each request on rank dcp_rank, in tokens, of total_lens keys on all ranks.

    Over the ranks they add up to total_lens; a rank holds none iff total <= dcp_rank * interleave.

    ValueError: a length that isn't whole or is negative; a rank outside the world; sizes below 1.
    """
    check_shard(dcp_rank=dcp_rank, dcp_world=dcp_world, interleave=interleave)
    return tuple(
        local_length(total, dcp_rank, dcp_world, interleave)
        for total in lengths("total_lens", total_lens)
    )


def local_length(total: int, dcp_rank: int, dcp_world: int, interleave: int) -> int:
    """Keys of one rank below the global position `total`; below 0 there are none."""
    stripes, rest = divmod(max(total, 0), interleave * dcp_world)
    return stripes * interleave + min(max(rest - dcp_rank * interleave, 0), interleave)


def owner_rank(position: int, *, dcp_world: int, interleave: int = 1) -> int:
    """The one rank that holds a global position (from 0 on)."""
    return position // interleave % dcp_world


def local_position(position: int, *, dcp_world: int, interleave: int = 1) -> int:
    """The place of a global position among the keys of the rank that holds it."""
    stripe = position // (interleave * dcp_world)
    return stripe * interleave + position % interleave


def global_position(local: int, *, dcp_rank: int, dcp_world: int, interleave: int = 1) -> int:
    """The global position of a rank's key number `local`: local_position's inverse."""
    run, offset = divmod(local, interleave)
    return (run * dcp_world + dcp_rank) * interleave + offset


def check_shard(
    *, dcp_rank: int, dcp_world: int, interleave: int, page_size: int | None = None
) -> None:
    """ValueError: a rank outside the world, sizes below 1, pages that cut a run of I in two."""
    at_least("dcp_world", dcp_world)
    at_least("interleave", interleave)
    if not 0 <= dcp_rank < dcp_world:
        raise ValueError(
            f"dcp_rank: {dcp_rank}; accepted are 0 to {dcp_world - 1} with dcp_world = {dcp_world}"
        )
    if page_size is not None and page_size % interleave:
        raise ValueError(
            f"interleave: {interleave} with pages of {page_size} keys; accepted is an interleave "
            "that divides the page size, so that no run of keys lies on two pages"
        )
