"""Rows of a decode batch: which request a query token belongs to and how many keys it may see.

Of a request with T keys in all, this step's included, query token j of q sees the global positions
below T - (q - 1 - j): all but the tokens after it. That bound is exclusive, is 1 or more wherever
T >= q, and is localised only after it is known: a shard's part of T, reduced by the tokens after,
is another number (W = 2, T = 16, q = 8: rank 0 holds 5 keys below 9, not 8 - 7 = 1).

Two sets of rules exist. By the fixed ones (vllm-project/vllm#59065) a batch may be viewed as
[requests, max_query_len] only if every request that has tokens owns exactly rows
i * max_query_len to (i + 1) * max_query_len - 1; everything else is ragged, one row per token.
Counting isn't enough: 8 + 2 tokens and 6 of padding are 16 = 2 * 8.

As vLLM 0.33.0 ships them (flashinfer_mla.py, with more than one rank), a causal batch is viewed as
[requests, tokens / requests] wherever the division comes out, so 8 + 2 becomes 5 + 5 in silence;
where it doesn't, as with 8 + 1, rows of one token meet bounds of one request each: 2 bounds for 9
rows. A non-causal batch gets one row per token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import SupportsIndex

from torch_ref.planning._arguments import at_least, lengths
from torch_ref.planning.prefill import Rules
from torch_ref.planning.sharding import check_shard, local_length


class BoundsShapeMismatch(ValueError):
    """The shipped rules' rows of one token with bounds of one request each: `rows` != `bounds`."""

    def __init__(self, rows: int, bounds: int) -> None:
        self.rows, self.bounds = rows, bounds
        super().__init__(
            f"{bounds} bounds for {rows} rows: {rows} tokens over {bounds} requests isn't a whole "
            "number, so vLLM 0.33.0 makes every token a row of its own, but lengths, block table "
            "and causal_seqlens_kv_global stay one per request"
        )


class NonUniformBlock(ValueError):
    """The shipped rules' refusal of a non-causal batch whose requests have different lengths."""


@dataclass(frozen=True)
class DecodeRows:
    """One entry per query row, padding included.

    ragged    the rows can't be viewed as [requests, max_query_len]
    request   the request whose block table and length the row uses
    bound     exclusive global bound on the key positions that it sees; below 1 there are none
    padding   the row belongs to no request; it has bound 0 by the fixed rules, which name the last
              request for it

    requests is B, those without a row included.
    """

    ragged: bool
    request: tuple[int, ...]
    bound: tuple[int, ...]
    padding: tuple[bool, ...]
    requests: int


def decode_rows(
    query_start_loc: Sequence[SupportsIndex],
    total_lens: Sequence[SupportsIndex],
    *,
    max_query_len: int,
    causal: bool = True,
    num_rows: int | None = None,
    rules: Rules = "fixed",
) -> DecodeRows:
    """The rows of a decode batch of B requests, as they are to be run with more than one rank.

    query_start_loc [B + 1] starts at 0 and never falls, total_lens [B] are global lengths with this
    step's tokens, both in tokens; a request may have no token, and fewer keys than tokens.
    max_query_len is the bound that the engine promises for every request, not the batch's own
    maximum. num_rows is the number of rows that q has, padding included; None: no padding.
    A non-causal row (a draft block) sees all of its request, the tokens after it too.

    Smallest example: query lengths 6, 2, 1 and totals 20, 9, 4 give requests 0 0 0 0 0 0 1 1 2 and
    bounds 15 16 17 18 19 20 8 9 4.

    ValueError: lengths that aren't whole, are negative, or aren't one per request; a
    query_start_loc that doesn't start at 0 or falls; a query longer than max_query_len; fewer rows
    than tokens; a causal that isn't a bool; unknown rules. By the rules of vLLM 0.33.0 also
    BoundsShapeMismatch and NonUniformBlock, both ValueErrors.
    """
    if rules not in ("fixed", "vllm-0.33.0"):
        raise ValueError(f"rules: {rules!r}; accepted are 'fixed' and 'vllm-0.33.0'")
    if not isinstance(causal, bool):
        raise ValueError(f"causal: {causal!r}; accepted are True and False")
    starts = query_starts(query_start_loc)
    totals = lengths("total_lens", total_lens)
    if len(totals) != len(starts) - 1:
        raise ValueError(
            f"total_lens: {len(totals)} lengths; query_start_loc has {len(starts) - 1} requests "
            "and one each is needed"
        )
    promised = at_least("max_query_len", max_query_len)
    for i, (start, end) in enumerate(pairwise(starts)):
        if end - start > promised:
            raise ValueError(
                f"max_query_len: {promised}; request {i} has {end - start} query tokens"
            )
    rows = starts[-1] if num_rows is None else at_least("num_rows", num_rows, 0)
    if rows < starts[-1]:
        raise ValueError(f"num_rows: {rows}; query_start_loc counts {starts[-1]} query tokens")

    if rules == "fixed":
        return _one_row_per_token(starts, totals, rows, promised, causal)
    return _as_shipped(starts, totals, rows, promised, causal)


def query_starts(query_start_loc: Sequence[SupportsIndex]) -> tuple[int, ...]:
    """query_start_loc as integers; ValueError unless it starts at 0 and never falls."""
    starts = lengths("query_start_loc", query_start_loc, each="entry")
    if not starts or starts[0] != 0:
        raise ValueError(
            f"query_start_loc: starts with {starts[0] if starts else 'nothing'}; accepted is 0, "
            "then the end of each request"
        )
    for i, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(f"query_start_loc: falls from {start} to {end} at request {i}")
    return starts


def _one_row_per_token(
    starts: tuple[int, ...], totals: tuple[int, ...], rows: int, promised: int, causal: bool
) -> DecodeRows:
    real = starts[-1]
    last = max(len(totals) - 1, 0)
    request = tuple(min(bisect_right(starts, t) - 1, last) for t in range(rows))
    bound = tuple(
        0 if t >= real else totals[i] - (starts[i + 1] - 1 - t if causal else 0)
        for t, i in enumerate(request)
    )
    return DecodeRows(
        ragged=_is_ragged(starts, promised),
        request=request,
        bound=bound,
        padding=tuple(t >= real for t in range(rows)),
        requests=len(totals),
    )


def _is_ragged(starts: tuple[int, ...], promised: int) -> bool:
    """Requests without a token at the end are padding; anywhere else they make a batch ragged."""
    owning = starts[: starts.index(starts[-1]) + 1]
    return owning != tuple(range(0, promised * len(owning), promised))


def _as_shipped(
    starts: tuple[int, ...], totals: tuple[int, ...], rows: int, promised: int, causal: bool
) -> DecodeRows:
    if not causal:
        counts = [end - start for start, end in pairwise(starts)]
        while counts and counts[-1] == 0:
            counts.pop()
        if len(set(counts)) > 1:
            raise NonUniformBlock(
                f"query lengths {counts}: vLLM 0.33.0 serves a non-causal batch only if all "
                "requests have one length, apart from empty ones at the end"
            )
        return _one_row_per_token(starts, totals, rows, promised, causal)
    requests = len(totals)
    if requests == 0:
        return _one_row_per_token(starts, totals, rows, promised, causal)
    each, rest = divmod(rows, requests)
    if rest:
        raise BoundsShapeMismatch(rows, requests)
    return DecodeRows(
        ragged=False,
        request=tuple(t // each for t in range(rows)),
        bound=tuple(totals[t // each] - (each - 1 - t % each) for t in range(rows)),
        padding=tuple(t >= starts[-1] for t in range(rows)),
        requests=requests,
    )


def local_key_counts(
    rows: DecodeRows,
    seq_lens: Sequence[SupportsIndex],
    *,
    dcp_rank: int = 0,
    dcp_world: int = 1,
    interleave: int = 1,
) -> tuple[int, ...]:
    """How many of its request's local keys each row sees: the first n, all that a kernel masks by.

    seq_lens are the local lengths in tokens, one per request. A padded row sees none.

    ValueError: lengths that aren't one per request of the rows, aren't whole or are negative; a
    rank outside the world.
    """
    check_shard(dcp_rank=dcp_rank, dcp_world=dcp_world, interleave=interleave)
    local = lengths("seq_lens", seq_lens)
    if len(local) != rows.requests:
        raise ValueError(
            f"seq_lens: {len(local)} lengths; the rows are of {rows.requests} requests and one "
            "each is needed"
        )
    return tuple(
        0 if padding else min(local[i], local_length(bound, dcp_rank, dcp_world, interleave))
        for i, bound, padding in zip(rows.request, rows.bound, rows.padding, strict=True)
    )
