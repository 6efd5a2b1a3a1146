"""Keys of a V4 prefill by name, whatever form they come in: rows of the flat call's kv, rows of a
chunk's workspace, and words.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from jaxtyping import Int64

from compare.generate.v4_batch import gathered_positions
from compare.judging.plans import PlanChunk
from compare.suites.v4_prefill.call import V4PrefillInputs

NOTHING = -1
"""In the place of a flat row: a workspace row that holds no key which a token may look at."""


class FlatRows:
    """Where each request's keys lie in the flat call's kv: request by request, of those with query
    tokens, first its compressed entries from 0 on, then its gathered positions, ascending.

    queries, lengths, entries, gathered, first_token, first_row [n]: of each request its tokens in
    this step, its context, how many keys of each kind it has, and where its tokens and rows begin.
    """

    def __init__(self, inputs: V4PrefillInputs) -> None:
        starts = inputs.query_start_loc.astype(np.int64)
        self.queries: Int64[np.ndarray, " n"] = np.diff(starts)
        self.lengths: Int64[np.ndarray, " n"] = inputs.seq_lens.astype(np.int64)
        self.first_token: Int64[np.ndarray, " n"] = starts[:-1] - starts[0]
        entries = self.lengths // inputs.compress_ratio
        self.entries = entries if inputs.compressed_cache is not None else np.zeros_like(entries)
        pairs = zip(self.lengths.tolist(), self.queries.tolist(), strict=True)
        gathered = [gathered_positions(*pair, inputs.window) for pair in pairs]
        self.gathered: Int64[np.ndarray, " n"] = np.array(gathered, np.int64)
        held = np.where(self.queries > 0, self.entries + self.gathered, 0)
        self._ends = np.cumsum(held)
        self.first_row: Int64[np.ndarray, " n"] = self._ends - held

    def token(self, token: int) -> tuple[int, int]:
        """(request, position) of a query token."""
        request = int(np.searchsorted(self.first_token + self.queries, token, side="right"))
        prefix = int(self.lengths[request] - self.queries[request])
        return request, prefix + token - int(self.first_token[request])

    def name(self, row: int) -> str:
        """A row of the flat kv in words."""
        request = int(np.searchsorted(self._ends, row, side="right"))
        number = row - int(self.first_row[request])
        if number < self.entries[request]:
            return f"compressed entry {number} of request {request}"
        oldest = self.lengths[request] - self.gathered[request]
        return f"position {int(oldest) + number - self.entries[request]} of request {request}"

    def token_name(self, token: int) -> str:
        """A query token in words."""
        request, position = self.token(token)
        return f"token {token} (request {request}, position {position})"

    def of_request(self, request: int, chunk: PlanChunk) -> Int64[np.ndarray, " M"]:
        """Of each row of a request's part of a chunk's workspace the flat row that is gathered to
        it; NOTHING where nothing is, or nothing that a token may look at.
        """
        rows = np.full(chunk.workspace_rows, NOTHING, np.int64)
        if self.queries[request]:
            first, entries = self.first_row[request], int(self.entries[request])
            count, N = int(self.gathered[request]), chunk.compressed_rows
            rows[:entries] = first + np.arange(entries)
            rows[N : N + count] = first + entries + np.arange(count)
        return rows

    def of_chunk(self, chunk: PlanChunk) -> Int64[np.ndarray, " rows"]:
        """The same of all requests of a chunk, one after the other."""
        parts = [self.of_request(request, chunk) for request in range(chunk.start, chunk.end)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def workspace_row_name(self, chunk: PlanChunk, row: int) -> str:
        """A row of a chunk's workspace, seen as [requests * M, 512], in words."""
        size = (chunk.end - chunk.start) * chunk.workspace_rows
        if not 0 <= row < size:
            return f"outside of the workspace's {size} rows"
        request, within = divmod(row, chunk.workspace_rows)
        request += chunk.start
        flat = int(self.of_request(request, chunk)[within])
        if flat != NOTHING:
            return self.name(flat)
        if not self.queries[request]:
            return f"a row of request {request}, which has no query token"
        return f"a row of request {request} that nothing is gathered to"

    def runnable(self, plan: tuple[PlanChunk, ...]) -> bool:
        """Whether each token is in one chunk, and each request's keys fit in the rows that the
        chunk has for them.
        """
        at = 0
        for chunk in plan:
            inside = range(chunk.start, chunk.end)
            if not 0 <= chunk.start < chunk.end <= len(self.queries):
                return False
            last = chunk.end - 1
            tokens = self.first_token[chunk.start], self.first_token[last] + self.queries[last]
            if (chunk.query_start, chunk.query_end) != tokens:
                return False
            N, room = chunk.compressed_rows, chunk.workspace_rows - chunk.compressed_rows
            needs = [r for r in inside if self.queries[r]]
            if any(self.entries[r] > N or self.gathered[r] > room for r in needs):
                return False
            if chunk.query_start != at:
                return False
            at = chunk.query_end
        ordered = all(a.end <= b.start for a, b in pairwise(plan))
        return ordered and at == int(self.queries.sum())
