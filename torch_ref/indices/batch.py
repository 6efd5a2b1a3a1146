"""Tokens of a batch: whose each is, and at which position of its context it stands."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from torch_ref.arguments import require_tensor, shape_of
from torch_ref.indices.checks import one_device, vector, whole


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """request [T] and position [T] of each token; per request its lengths and its first row."""

    request: Int64[Tensor, " T"]
    position: Int64[Tensor, " T"]
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    first_rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.request)

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of context before this step, of each request."""
        return tuple(s - q for s, q in zip(self.seq_lens, self.query_lens, strict=True))

    def of_token(self, values: tuple[int, ...]) -> Int64[Tensor, " T"]:
        """One value per request, as one per token."""
        each = torch.tensor(values, dtype=torch.long, device=self.request.device)
        return each[self.request] if len(values) else self.request


def token_batch(
    query_start_loc: Int32[Tensor, " n+1"], seq_lens: Int32[Tensor, " n"]
) -> TokenBatch:
    """The batch of these offsets and lengths.

    query_start_loc may begin above 0, as an engine's global offsets do for its prefill requests:
    row t is token t + query_start_loc[0]. seq_lens counts the context with this step's tokens, so
    token t of request i has position seq_len - query_len + (t - first row).

    ValueError: offsets that fall, a length below its request's query tokens.
    """
    starts = query_starts(query_start_loc)
    vector("seq_lens", seq_lens, len(starts) - 1)
    one_device(query_start_loc=query_start_loc, seq_lens=seq_lens)
    lengths = tuple(seq_lens.tolist())
    queries = tuple(end - start for start, end in pairwise(starts))
    for i, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        if length < count:
            raise ValueError(
                f"seq_lens: {length} for request {i} of {count} query tokens; accepted are "
                f"{count} and more"
            )
    device = query_start_loc.device
    request = torch.repeat_interleave(
        torch.arange(len(queries), device=device), torch.tensor(queries, device=device).long()
    )
    batch = TokenBatch(request, request, lengths, queries, tuple(starts[:-1]))
    row = torch.arange(starts[-1], device=device)
    position = batch.of_token(batch.prefixes) + row - batch.of_token(batch.first_rows)
    return TokenBatch(request, position, lengths, queries, tuple(starts[:-1]))


def query_starts(query_start_loc: Int32[Tensor, " n+1"]) -> list[int]:
    """The offsets relative to the first of them; ValueError unless they never fall."""
    require_tensor("query_start_loc", query_start_loc, torch.int32)
    if query_start_loc.ndim != 1 or not len(query_start_loc):
        raise ValueError(f"query_start_loc: shape {shape_of(query_start_loc)}; accepted is [n + 1]")
    starts = query_start_loc.tolist()
    for i, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(
                f"query_start_loc: {end} after {start} at request {i}; accepted are offsets that "
                "never fall"
            )
    return [start - starts[0] for start in starts]


def token_to_request(
    query_start_loc: Int32[Tensor, " n+1"], num_tokens: int, *, num_mapped: int | None = None
) -> Int32[Tensor, " T"]:
    """The request of each of num_tokens rows: the smallest i with query_start_loc[i + 1] > t.

    Requests without tokens are skipped. Rows past the last request's tokens are given the last
    request; rows from num_mapped on (None: none) are padding and given request 0. Offsets count
    from their first entry. Source: vLLM's attention/ops/metadata.py.
    """
    starts = query_starts(query_start_loc)
    if len(starts) == 1:
        raise ValueError("query_start_loc: no request; accepted are 1 and more")
    num_tokens = whole("num_tokens", num_tokens, 0)
    num_mapped = num_tokens if num_mapped is None else whole("num_mapped", num_mapped, 0)
    device = query_start_loc.device
    row = torch.arange(num_tokens, device=device)
    ends = torch.tensor(starts[1:], device=device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    return request.masked_fill(row >= num_mapped, 0).int()
