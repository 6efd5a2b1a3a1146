"""Rows of a decode batch: each query token with its request and its causal bound.

Attention over a sharded KV cache can't tell a token's place from the local number of keys, so
each token carries its bound, the number of first global positions that it may see. Bounds are
made here in global positions; only then are they counted in a rank's own keys. Done the other
way round (a request's local length, less one per later token) every rank would cut off its own
newest keys, of which it holds only one in W.

Sources: "VL" is vLLM 0.33.0, vllm/v1/attention/backends/mla/flashinfer_mla.py; "PR-B" is the fix
for vllm-project/vllm#59065; "FI" is FlashInfer 0.7.4's `causal_seqlens_kv_global`.
docs/planning-rules.md has the rules in context.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int64

from jax_impl.planning._arguments import (
    INT32_MAX,
    INT64_MAX,
    Lengths,
    integer,
    lengths,
    query_offsets,
    sharding,
)
from jax_impl.planning.kv_sharding import count_before

NO_REQUEST = -1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """A batch as single-token rows, one for each query token, padding behind them.

    Attributes:
        ragged: the batch may not be viewed as [requests, max_query_len, ...].
        request: [N] the request that a row belongs to; -1 for padding.
        bound: [N] how many first global positions of its request a row may see (exclusive
            bound). At most the request's length; may be <= 0: the row sees nothing. 0 for padding.
        padding: rows at the end that belong to no request.
        num_requests: B, those without a row included.
    """

    ragged: bool
    request: Int64[np.ndarray, " N"]
    bound: Int64[np.ndarray, " N"]
    padding: int
    num_requests: int


def is_ragged(query_start_loc: Lengths, *, max_query_len: int) -> bool:
    """Whether the batch may not be viewed as [requests, max_query_len, ...].

    Rule (PR-B): uniform means tokens == requests * max_query_len, with the promised maximum, not
    an average: 8 + 2 tokens divide by 2, but their view as 5 + 5 gives rows to the wrong request.

    >>> is_ragged([0, 8, 10], max_query_len=8)
    True
    >>> is_ragged([0, 8, 16], max_query_len=8)
    False

    Rule (this project): each real request owns exactly its own max_query_len rows. A count alone
    is fooled by padding (8 + 2 tokens and 6 padded ones are 16 = 2 * 8), and by a request without
    tokens in the middle (8 + 0 + 8). Requests without tokens at the end are padding and don't
    count.

    >>> is_ragged([0, 8, 8, 16], max_query_len=8)
    True
    >>> is_ragged([0, 8, 16, 16], max_query_len=8)
    False

    Rule (PR-B): one token each is ragged under a promise of 8; a legal view, but not this one.

    >>> is_ragged([0, 1, 2], max_query_len=8)
    True

    Args:
        query_start_loc: [B + 1] offsets of the requests' query tokens, from 0; without padding.
        max_query_len: most query tokens that a request may have in this step, >= 1.

    Raises:
        ValueError: query_start_loc is no list of offsets, or a request has more tokens.
    """
    offsets, longest = _offsets_and_longest(query_start_loc, max_query_len)
    real = len(offsets) - 1
    while real and offsets[real] == offsets[real - 1]:
        real -= 1
    return any(offsets[i] != i * longest for i in range(real + 1))


def decode_rows(
    query_start_loc: Lengths,
    total_lens: Lengths,
    *,
    max_query_len: int,
    causal: bool = True,
    num_rows: int | None = None,
) -> DecodeRows:
    """Expand a batch to single-token rows with global bounds.

    Rule (VL, FI): the bound of a token is its request's global length less the request's tokens
    after it, so that it sees itself and all before it.

    >>> rows = decode_rows([0, 6, 8, 9], [20, 9, 4], max_query_len=6)
    >>> rows.request.tolist()
    [0, 0, 0, 0, 0, 0, 1, 1, 2]
    >>> rows.bound.tolist()
    [15, 16, 17, 18, 19, 20, 8, 9, 4]

    Rule (VL): tokens of a non-causal block, as of a draft, see one another.

    >>> decode_rows([0, 3], [17], max_query_len=3, causal=False).bound.tolist()
    [17, 17, 17]

    Rule (this project): a request without tokens has no row; a row of no request sees nothing.

    >>> rows = decode_rows([0, 1, 1, 2], [5, 0, 7], max_query_len=1, num_rows=4)
    >>> rows.request.tolist(), rows.bound.tolist(), rows.padding
    ([0, 2, -1, -1], [5, 7, 0, 0], 2)

    Rule (FI's tests): a length below the number of tokens is served; its first rows see nothing.

    >>> decode_rows([0, 4], [1], max_query_len=4).bound.tolist()
    [-2, -1, 0, 1]

    Args:
        query_start_loc: [B + 1] offsets of the requests' query tokens, from 0; without padding.
        total_lens: [B] global length of each request, this step's tokens included.
        max_query_len: most query tokens that a request may have in this step, >= 1; the promised
            bound, not the largest one met.
        causal: whether a token is barred from its request's later tokens.
        num_rows: rows of the batch, padding included; None: no padding.

    Raises:
        ValueError: an argument is out of its range (lengths go up to 2^63 - 1, rows up to
            2^31 - 1), total_lens is not one per request, a request has more than max_query_len
            tokens, or num_rows is less than the batch's tokens.
    """
    ragged = is_ragged(query_start_loc, max_query_len=max_query_len)
    offsets = np.asarray(query_offsets(query_start_loc), np.int64)
    totals = per_request("total_lens", total_lens, len(offsets) - 1)
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal: {causal!r}; accepted: True or False")
    tokens = int(offsets[-1])
    rows = tokens if num_rows is None else integer("num_rows", num_rows, least=0, most=INT32_MAX)
    if rows < tokens:
        raise ValueError(
            f"num_rows: {rows}; accepted: at least query_start_loc[-1] = {tokens}, or None"
        )
    request = np.repeat(np.arange(len(totals)), np.diff(offsets))
    bound = totals[request]
    if causal:
        bound = bound - (offsets[request + 1] - 1 - np.arange(tokens))
    padding = rows - tokens
    return DecodeRows(
        ragged=ragged,
        request=np.pad(request, (0, padding), constant_values=NO_REQUEST),
        bound=np.pad(bound, (0, padding)),
        padding=padding,
        num_requests=len(totals),
    )


def local_key_counts(
    rows: DecodeRows,
    seq_lens: Lengths,
    *,
    dcp_rank: int = 0,
    dcp_world: int = 1,
    interleave: int = 1,
) -> Int64[np.ndarray, " N"]:
    """How many of a rank's keys of its request each row sees; they are the first ones.

    Rule (FI): a key must lie below the row's bound, counted here in the rank's own keys for any
    interleave, and within what the rank holds.

    >>> rows = decode_rows([0, 3], [5], max_query_len=3)        # bounds 3, 4, 5
    >>> local_key_counts(rows, [3], dcp_rank=0, dcp_world=2).tolist()
    [2, 2, 3]
    >>> local_key_counts(rows, [2], dcp_rank=1, dcp_world=2).tolist()
    [1, 2, 2]

    Args:
        rows: from `decode_rows`.
        seq_lens: [B] keys of each request that the rank holds.

    Raises:
        ValueError: an argument is out of its range, or seq_lens is not one per request of rows.
    """
    rank, world, run = sharding(dcp_rank, dcp_world, interleave)
    held = per_request("seq_lens", seq_lens, rows.num_requests)
    real = rows.request != NO_REQUEST
    counts = np.zeros(len(rows.request), np.int64)
    counts[real] = np.minimum(
        held[rows.request[real]], count_before(rows.bound[real], rank, world, run)
    )
    return counts


def per_request(name: str, values: Lengths, requests: int) -> Int64[np.ndarray, " B"]:
    """The lengths as an array, once there is one for each request of query_start_loc."""
    exact = lengths(name, values, most=INT64_MAX)
    if len(exact) != requests:
        raise ValueError(
            f"{name}: {len(exact)} entries; accepted: one per request of query_start_loc, "
            f"{requests} (a batch of single-token rows is a batch of as many requests)"
        )
    return np.asarray(exact, np.int64)


def _offsets_and_longest(
    query_start_loc: Lengths, max_query_len: int
) -> tuple[tuple[int, ...], int]:
    offsets = query_offsets(query_start_loc)
    longest = integer("max_query_len", max_query_len, least=1)
    lens = np.diff(offsets)
    for i in np.flatnonzero(lens > longest)[:1]:
        raise ValueError(
            f"max_query_len: {longest}, but request {i} of query_start_loc has {lens[i]} query "
            "tokens; accepted: a bound that no request exceeds"
        )
    return offsets, longest
