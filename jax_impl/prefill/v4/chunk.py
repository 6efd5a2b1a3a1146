"""One chunk as one program: gather, list, attend. And the same without a workspace. With NumPy's
arrays, the caches' too, the same functions run outside jit, under "xla" alone.

A program is compiled for each combination of shapes: requests, N, M, tokens, images and block-table
columns of the chunk, tokens of the batch, heads, top-k, sizes of the caches; and for each scale and
backend. Lengths, offsets, pages and what the caches hold are operands.

Memory: beside its operands and the batch's results, into which it writes its rows, a chunk needs
its workspace of (e - s) * M rows of 1 KiB, both caches gathered into the same one, and its index
lists of t * C int32. They are gone when it ends, so chunks that run one after another need the
largest one's. The kernel reads the chunk's queries where they are; "xla", a negative scale and head
counts that aren't a multiple of 64 add a copy of the chunk's queries and results.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import namespace
from jax_impl.kv_cache import PagedKV, gather_kv_into
from jax_impl.kv_cache.xla import gather_on_host
from jax_impl.planning import PrefillChunk
from jax_impl.prefill.indices.entries import all_entries
from jax_impl.prefill.indices.keys import combined_rows, combined_slots
from jax_impl.prefill.indices.layout import combined_width
from jax_impl.prefill.indices.slots import no_table
from jax_impl.prefill.indices.tokens import IndexLists, visible_in_images, window_rows
from jax_impl.prefill.sparse.api import sparse_prefill_into
from jax_impl.prefill.sparse.batch import BatchRows, BatchRowsOnHost
from jax_impl.prefill.sparse.paged import sparse_prefill_paged_into
from jax_impl.prefill.sparse.result import SparsePrefillResult
from jax_impl.prefill.v4.result import ChunkStage


class ChunkArrays(NamedTuple):
    """Some consecutive requests of a batch, r of them, beside what all of them share."""

    q: jax.Array  # [T, H, 512] bfloat16, of the whole batch
    swa: PagedKV
    swa_block_table: jax.Array  # [r, columns] int32
    compressed: PagedKV | None
    compressed_block_table: jax.Array | None  # [r, columns] int32
    topk_indices: jax.Array | None  # [T, topk] int32; None with a compressed cache: all entries
    query_start_loc: jax.Array  # [r + 1] int32
    seq_lens: jax.Array  # [r] int32
    spans: np.ndarray  # [S, 2] int32
    span_offsets: np.ndarray  # [r + 1] int32
    attn_sink: jax.Array | None  # [H] float32
    first_token: jax.Array | np.int32 = np.int32(0)  # of these requests, in the batch

    def of(self, chunk: PrefillChunk) -> ChunkArrays:
        """The chunk's requests; nothing is copied that has a row for each token."""
        requests = functools.partial(_part, start=chunk.start, end=chunk.end)
        offsets = functools.partial(_part, start=chunk.start, end=chunk.end + 1)
        bounds = np.asarray(offsets(self.span_offsets))
        return self._replace(
            swa_block_table=requests(self.swa_block_table),
            compressed_block_table=requests(self.compressed_block_table),
            query_start_loc=offsets(self.query_start_loc),
            seq_lens=requests(self.seq_lens),
            spans=self.spans[bounds[0] : bounds[-1]],
            span_offsets=bounds - bounds[0],
            first_token=np.int32(chunk.query_start),
        )


def _part(array: Any, *, start: int, end: int) -> Any:
    if array is None or (start, end) == (0, array.shape[0]):
        return array
    return array[start:end]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a whole batch has in common; static."""

    compress_ratio: int
    window: int
    max_image_tokens: int
    all_entries_width: int  # columns of the lists of all entries, where topk_indices is None
    sm_scale: float
    backend: str  # resolved

    def width(self, topk: int) -> int:
        return combined_width(topk, self.window, self.max_image_tokens)


def _attend_chunk(
    arrays: ChunkArrays,
    whole: SparsePrefillResult,
    *,
    num_tokens: int,
    compressed_rows: int,
    workspace_rows: int,
    settings: Settings,
    keep_stage: bool = False,
) -> tuple[SparsePrefillResult, ChunkStage | None]:
    """Gathers both caches into one workspace, lists its rows for each token, and attends.

    `whole` with the rows of the requests' num_tokens tokens; it is written to, not copied.
    """
    num_requests, d = arrays.seq_lens.shape[0], arrays.q.shape[2]
    gathered = window_rows(arrays.query_start_loc, arrays.seq_lens, settings.window)
    on_host = isinstance(arrays.q, np.ndarray)
    rows = jax.ShapeDtypeStruct((num_requests, workspace_rows, d), jnp.bfloat16)
    if on_host:
        workspace, gather_into = _empty_on_host(rows), gather_on_host
    else:
        workspace = _empty_workspace(rows)
        gather_into = functools.partial(gather_kv_into, backend=settings.backend)
    if arrays.compressed is not None and compressed_rows:
        entries = namespace(arrays.seq_lens).minimum(
            arrays.seq_lens // settings.compress_ratio, compressed_rows
        )
        gather_into(
            arrays.compressed, arrays.compressed_block_table, entries, workspace,
            gather_lens=entries, offset=0,
        )  # fmt: skip
    gather_into(
        arrays.swa, arrays.swa_block_table, arrays.seq_lens, workspace, gather_lens=gathered,
        offset=compressed_rows,
    )  # fmt: skip
    lists = combined_rows(
        *_list_arguments(arrays, num_tokens, settings), gathered, workspace_rows, compressed_rows,
        settings.compress_ratio, settings.window, width=_width(arrays, settings),
    )  # fmt: skip
    kv = workspace[...]
    batch = _rows_of(arrays, whole)
    sparse_prefill_into(
        batch, kv.reshape(-1, d), lists.indices, settings.sm_scale,
        attn_sink=arrays.attn_sink, topk_length=lists.lengths, backend=settings.backend,
    )  # fmt: skip
    return batch.written(), ChunkStage(kv, *lists) if keep_stage else None


def _attend_pages(
    arrays: ChunkArrays, whole: SparsePrefillResult, *, num_tokens: int, settings: Settings
) -> SparsePrefillResult:
    """Lists slots of the caches for each token, and attends to the pages where they are.

    Writes to `whole`, as attend_chunk does.
    """
    lists = slot_lists(arrays, num_tokens, settings)
    caches = (arrays.swa,) if arrays.compressed is None else (arrays.compressed, arrays.swa)
    batch = _rows_of(arrays, whole)
    sparse_prefill_paged_into(
        batch, caches, lists.indices, settings.sm_scale,
        attn_sink=arrays.attn_sink, topk_length=lists.lengths, backend=settings.backend,
    )  # fmt: skip
    return batch.written()


_CHUNK = ("num_tokens", "compressed_rows", "workspace_rows", "settings", "keep_stage")
_PAGES = ("num_tokens", "settings")

# What is traced has no memory to hand over, and a transformation such as vmap would say so.
attend_chunk = jax.jit(_attend_chunk, static_argnames=_CHUNK, donate_argnames="whole")
attend_pages = jax.jit(_attend_pages, static_argnames=_PAGES, donate_argnames="whole")


class Way(NamedTuple):
    """How chunks are run: with a workspace, and without one."""

    on_chunk: Any
    on_pages: Any


COMPILED = Way(attend_chunk, attend_pages)
TRACED = Way(
    jax.jit(_attend_chunk, static_argnames=_CHUNK), jax.jit(_attend_pages, static_argnames=_PAGES)
)
ON_HOST = Way(_attend_chunk, _attend_pages)


def _rows_of(arrays: ChunkArrays, whole: SparsePrefillResult) -> BatchRows:
    if isinstance(arrays.q, np.ndarray):
        return BatchRowsOnHost(arrays.q, whole, arrays.first_token)
    result = SparsePrefillResult(*map(jax.new_ref, whole))
    return BatchRows(arrays.q, result, jnp.asarray(arrays.first_token))


def slot_lists(arrays: ChunkArrays, num_tokens: int, settings: Settings) -> IndexLists:
    table, page_size, num_slots = no_table(arrays.seq_lens.shape[0]), 1, 0
    if arrays.compressed is not None:
        table = arrays.compressed_block_table
        page_size, num_slots = arrays.compressed.page_size, arrays.compressed.num_slots
    return combined_slots(
        *_list_arguments(arrays, num_tokens, settings), arrays.swa_block_table, table,
        arrays.swa.page_size, arrays.swa.num_slots, page_size, num_slots,
        settings.compress_ratio, settings.window, width=_width(arrays, settings),
    )  # fmt: skip


def _empty_workspace(rows: jax.ShapeDtypeStruct) -> Any:
    """Nothing may depend on what is in it."""
    return jax.empty_ref(rows)


def _empty_on_host(rows: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.empty(rows.shape, rows.dtype)


def _list_arguments(arrays: ChunkArrays, num_tokens: int, settings: Settings) -> tuple[Any, ...]:
    images = visible_in_images(
        arrays.query_start_loc, arrays.seq_lens, arrays.spans, arrays.span_offsets,
        settings.max_image_tokens, num_tokens=num_tokens,
    )  # fmt: skip
    entries = arrays.topk_indices
    if entries is not None and num_tokens != entries.shape[0]:
        if isinstance(entries, np.ndarray):
            entries = entries[arrays.first_token :][:num_tokens]
        else:
            entries = jax.lax.dynamic_slice_in_dim(entries, arrays.first_token, num_tokens)
    if entries is None and arrays.compressed is None:
        entries = np.zeros((num_tokens, 0), np.int32)
    elif entries is None:
        entries = all_entries(
            arrays.query_start_loc, arrays.seq_lens, settings.compress_ratio,
            num_tokens=num_tokens, width=settings.all_entries_width,
        )  # fmt: skip
    return entries, arrays.query_start_loc, arrays.seq_lens, *images


def _width(arrays: ChunkArrays, settings: Settings) -> int:
    if arrays.topk_indices is not None:
        return settings.width(arrays.topk_indices.shape[1])
    return settings.width(settings.all_entries_width if arrays.compressed is not None else 0)
