"""Batches for the whole V4 path: paged caches, chosen entries, and what every token attends to.

The keys that a token attends to come from `index_lists`, in loops; the rows behind them are kept
beside the caches that they were put into.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_impl import v4_prefill
from jax_impl.kv_cache import PagedKV, empty_cache, insert_kv, read_kv
from tests.jax_impl.prefill.index_lists import Batch, i32, random_table, slot
from tests.jax_impl.prefill.problems import bf16
from tests.jax_impl.prefill.reference import Expected, reference

SPARE_PAGES = 3
ENGINE: dict[str, Any] = {"max_model_len": 320, "max_num_batched_tokens": 32, "chunk_size": 2}
SCALE = 2.0 * 512**-0.5


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of v4_prefill, and the rows [n, seq or entries, 512] that its caches hold."""

    batch: Batch
    arguments: dict[str, Any]
    window_rows: list[np.ndarray]
    entry_rows: list[np.ndarray]

    def run(self, backend: str = "xla", **other: Any) -> Any:
        arguments: dict[str, Any] = self.arguments | {"backend": backend} | other
        return v4_prefill(**arguments)

    def expected(self) -> Expected:
        """The whole batch as one plain sparse prefill in float64."""
        keys: list[np.ndarray] = []
        firsts: dict[str, list[int]] = {"position": [], "entry": []}
        for kind, each in (("position", self.window_rows), ("entry", self.entry_rows)):
            for rows in each:
                firsts[kind].append(sum(map(len, keys)))
                keys.append(rows)
        lists = [
            [firsts[kind][request] + number for kind, number in self.batch.keys(token)]
            for token, (request, _) in enumerate(self.batch.tokens)
        ]
        indices = np.full((len(lists), max(map(len, lists), default=1)), -1)
        for row, listed in enumerate(lists):
            indices[row, : len(listed)] = listed
        q, scale = self.arguments["q"], self.arguments["sm_scale"]
        return reference(
            q, np.concatenate(keys), indices, scale, attn_sink=self.arguments.get("attn_sink")
        )

    def alone(self, request: int) -> Any:
        """The arguments that call for one request of the batch, with the same caches."""
        first = self.batch.query_start_loc[0]
        start, end = self.batch.query_start_loc[request : request + 2] - first
        one, tokens = slice(request, request + 1), slice(start, end)
        mine = dict(self.arguments)
        mine["query_start_loc"] = i32([3, 3 + end - start])
        cuts = {"seq_lens": one, "swa_block_table": one, "compressed_block_table": one,
                "image_spans": one, "seq_lens_bound": one, "q": tokens,
                "topk_indices": tokens}  # fmt: skip
        for name, cut in cuts.items():
            if mine.get(name) is not None:
                mine[name] = mine[name][cut]
        return mine


def problem(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    ratio: int = 4,
    topk: int = 16,
    window: int = 8,
    heads: int = 2,
    kv_format: str = "bf16",
    page_size: int = 16,
    compressed_page_size: int = 2,
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None,
    max_image: int = 0,
    sink: bool = True,
    first: int = 5,
    seed: int = 0,
    **other: Any,
) -> Problem:
    """Random values; whatever lies outside every length is NaN, and so are the spare pages.

    ratio 0: no compressed cache. topk 0: no topk_indices, so all entries.
    """
    rng = np.random.default_rng(seed)
    batch = Batch(
        i32(first + np.cumsum([0, *query_lens])), i32(seq_lens), max(ratio, 1), window,
        _topk(topk, ratio), None, spans or ((),) * len(seq_lens), max_image,
    )  # fmt: skip
    chosen = np.full((sum(query_lens), batch.topk), -1, np.int32)
    for row, (_, position) in enumerate(batch.tokens):
        visible = np.arange((position + 1) // batch.ratio)
        visible = (rng.permutation(visible) if topk else visible)[: batch.topk]
        chosen[row, : len(visible)] = visible
    batch = dataclasses.replace(batch, topk_indices=chosen)
    swa, swa_table, window_rows = filled_cache(rng, kv_format, page_size, seq_lens)
    arguments: dict[str, Any] = {
        "q": bf16(rng.standard_normal((sum(query_lens), heads, 512))),
        "swa": swa,
        "swa_block_table": swa_table,
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "sm_scale": SCALE,
        "compress_ratio": ratio,
        "window": window,
        "attn_sink": np.asarray(rng.standard_normal(heads), np.float32) if sink else None,
        **ENGINE,
        **other,
    }
    if spans is not None:
        arguments |= {"image_spans": spans, "max_image_tokens": max_image}
    entry_rows: list[np.ndarray] = []
    if ratio:
        entries = [seq // ratio for seq in seq_lens]
        compressed, table, entry_rows = filled_cache(rng, kv_format, compressed_page_size, entries)
        arguments |= {
            "compressed": compressed,
            "compressed_block_table": table,
            "topk_indices": chosen if topk else None,
        }
    return Problem(batch, arguments, window_rows, entry_rows)


def filled_cache(
    rng: np.random.Generator, kv_format: str, page_size: int, lens: list[int]
) -> tuple[PagedKV, np.ndarray, list[np.ndarray]]:
    """A cache of requests of these lengths, its block table, and the rows that it holds.

    Table columns behind a request's last page name no page at all.
    """
    columns = max(1, -(-max(lens, default=0) // page_size))
    pages = len(lens) * columns + SPARE_PAGES
    table = random_table(rng, len(lens), columns, pages)
    slots = [[slot(table, b, i, page_size) for i in range(n)] for b, n in enumerate(lens)]
    values = [bf16(rng.standard_normal((n, 512))) for n in lens]
    paged = empty_cache(kv_format, num_pages=pages, page_size=page_size, fill=0xFF)
    mapping = i32([s for row in slots for s in row])
    if len(mapping):
        paged = insert_kv(paged, np.concatenate(values), mapping)
    rows = [
        np.asarray(read_kv(paged, i32(row))) if row else np.zeros((0, 512), values[0].dtype)
        for row in slots
    ]
    needed = np.arange(columns) < -(-np.asarray(lens)[:, None] // page_size)
    garbage = rng.choice([-1, -7, pages, 2**31 - 1], table.shape).astype(np.int32)
    return paged, np.where(needed, table, garbage), rows


def _topk(topk: int, ratio: int) -> int:
    """Columns of the lists: without an indexer as many as there can be here, ENGINE's 128."""
    return topk or (128 if ratio else 0)


def numpy_of(result: Any) -> Any:
    return jax.tree.map(np.asarray, result)
