"""What each token lists, in loops over plain Python numbers, and random batches to list it for.

It shares nothing with the package under test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Key = tuple[str, int]
"""("entry", number of a compressed entry) or ("position", of a window row), within a request."""


@dataclasses.dataclass(frozen=True)
class Batch:
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    ratio: int
    window: int
    topk: int
    topk_indices: Any  # [T, topk] int32, or None without compressed entries
    spans: tuple[tuple[tuple[int, int], ...], ...]
    max_image: int

    @property
    def query_lens(self) -> list[int]:
        return [int(x) for x in np.diff(self.query_start_loc)]

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(request, position) of each token, in order."""
        return [
            (i, int(seq) - query + k)
            for i, (seq, query) in enumerate(zip(self.seq_lens, self.query_lens, strict=True))
            for k in range(query)
        ]

    @property
    def gather_lens(self) -> np.ndarray:
        return i32(
            [
                query + min(max(int(seq) - query, 0), self.window - 1)
                for seq, query in zip(self.seq_lens, self.query_lens, strict=True)
            ]
        )

    def visibility(self, request: int, position: int) -> tuple[int, int]:
        seen = (0, 0)
        for first, last in self.spans[request]:
            if first <= position <= last:
                left = min(position - first, self.max_image - 1)
                seen = (left, min(last - position, self.max_image))
        return seen

    @property
    def images(self) -> tuple[np.ndarray, np.ndarray]:
        seen = [self.visibility(*token) for token in self.tokens]
        return i32([left for left, _ in seen]), i32([right for _, right in seen])

    def keys(self, token: int) -> list[Key]:
        request, position = self.tokens[token]
        left, right = self.visibility(request, position)
        visible = (position + 1) // self.ratio if self.topk else 0
        entries = min(visible, self.topk)
        first = max(position - max(self.window - 1, left), 0)
        listed: list[Key] = [("entry", int(self.topk_indices[token, c])) for c in range(entries)]
        return listed + [("position", p) for p in range(first, position + right + 1)]

    @property
    def width(self) -> int:
        return -(-(self.topk + self.window + self.max_image) // 128) * 128


def i32(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


def filled(lists: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Lists as rows of a matrix, filled up with -1, and their lengths."""
    indices = np.full((len(lists), width), -1, np.int32)
    for row, values in enumerate(lists):
        indices[row, : len(values)] = values
    return indices, i32([len(values) for values in lists])


def workspace_rows(batch: Batch, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    lists = []
    for token, (request, _) in enumerate(batch.tokens):
        begin = int(batch.seq_lens[request]) - int(batch.gather_lens[request])
        rows = [
            m * request + (number if kind == "entry" else n + number - begin)
            for kind, number in batch.keys(token)
        ]
        lists.append(rows)
    return filled(lists, batch.width)


def slot(table: np.ndarray, request: int, number: int, page_size: int) -> int:
    return int(table[request, number // page_size]) * page_size + number % page_size


def random_batch(seed: int, *, images: bool = False) -> Batch:
    """Few and small requests; some without tokens, some from position 0, some far on."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    queries = [int(rng.choice([0, 1, 2, 7, 12])) for _ in range(count)]
    prefixes = [int(rng.choice([0, 1, 6, 7, 8, 40, 300])) for _ in range(count)]
    queries[int(rng.integers(count))] = 5
    ratio = int(rng.choice([1, 2, 4, 128]))
    topk = int(rng.choice([0, 3, 16, 120]))
    window = int(rng.choice([1, 8, 128]))
    seq_lens = [query + prefix for query, prefix in zip(queries, prefixes, strict=True)]
    spans: list[tuple[tuple[int, int], ...]] = []
    max_image = 10 if images else 0
    for query, prefix in zip(queries, prefixes, strict=True):
        mine = []
        for _ in range(2 if images and query else 0):
            first = prefix + int(rng.integers(query))
            last = min(first + int(rng.integers(max_image)), prefix + query - 1)
            mine.append((first, last))
        spans.append(tuple(mine))
    batch = Batch(
        query_start_loc=i32(int(rng.integers(9)) + np.cumsum([0, *queries])),
        seq_lens=i32(seq_lens),
        ratio=ratio,
        window=window,
        topk=topk,
        topk_indices=None,
        spans=tuple(spans),
        max_image=max_image,
    )
    if not topk:
        return batch
    chosen = np.full((sum(queries), topk), -1, np.int32)
    for row, (_, position) in enumerate(batch.tokens):
        visible = rng.permutation((position + 1) // ratio)[:topk]
        chosen[row, : len(visible)] = visible
    return dataclasses.replace(batch, topk_indices=chosen)


def random_table(rng: np.random.Generator, rows: int, columns: int, pages: int) -> np.ndarray:
    """A block table whose pages are all different."""
    return rng.permutation(pages)[: rows * columns].reshape(rows, columns).astype(np.int32)
