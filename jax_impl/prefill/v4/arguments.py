"""Checks what a caller hands to the V4 prefill path, before anything is planned or converted."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_impl.arrays import is_traced, known_number, shape_of, shares_memory, to_jax
from jax_impl.kv_cache import PagedKV
from jax_impl.prefill.indices import checks
from jax_impl.prefill.indices.entries import c128_width
from jax_impl.prefill.indices.layout import WIDTH_MULTIPLE
from jax_impl.prefill.indices.tokens import image_spans_csr
from jax_impl.prefill.sparse.arguments import D_V, MAX_HEADS, check_sink_and_length
from jax_impl.prefill.sparse.paged import FORMAT
from jax_impl.prefill.v4.chunk import ChunkArrays, Settings
from jax_impl.prefill.v4.plan import PlanRequest

_BY_REQUEST = ("swa_block_table", "compressed_block_table", "query_start_loc", "seq_lens")


class Arguments(NamedTuple):
    arrays: ChunkArrays  # of the whole batch
    settings: Settings
    request: PlanRequest
    shared: bool  # some lie in memory that the caller can still write to


def check(
    q: Any,
    swa: Any,
    swa_block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    sm_scale: Any,
    *,
    compress_ratio: Any,
    compressed: Any,
    compressed_block_table: Any,
    topk_indices: Any,
    window: Any,
    attn_sink: Any,
    image_spans: Any,
    max_image_tokens: Any,
    seq_lens_bound: Any,
    max_model_len: Any,
    max_num_batched_tokens: Any,
    chunk_size: Any,
    backend: str,
    validate: bool,
) -> Arguments:
    """Raises ValueError or NotImplementedError for what can't be served, else converts."""
    num_tokens, num_heads = _check_q(q)
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    _check_cache(swa, "swa", swa_block_table, num_requests)
    compress_ratio = checks.count(compress_ratio, "compress_ratio")
    _check_compressed(compress_ratio, compressed, compressed_block_table, topk_indices)
    if compressed is not None:
        _check_cache(compressed, "compressed", compressed_block_table, num_requests)
        columns = swa_block_table.shape[1] + compressed_block_table.shape[1]
        checks.check_columns(columns, "swa_block_table and compressed_block_table together")
    _check_topk_rows(topk_indices, num_tokens)
    check_sink_and_length(attn_sink, None, (num_tokens, num_heads, D_V))
    window = checks.count(window, "window", least=1)
    max_image_tokens = checks.count(max_image_tokens, "max_image_tokens")
    spans, span_offsets = _spans_of(image_spans, num_requests)
    offsets = _host_offsets(query_start_loc, num_tokens)
    bounds = _host_bounds(seq_lens, seq_lens_bound, num_requests)
    lengths_known = checks.known(validate, seq_lens)
    if lengths_known:
        checks.check_batch(query_start_loc, seq_lens)
        _check_bounds(seq_lens, bounds)

    request = PlanRequest(
        seq_lens=bounds,
        query_lens=tuple(np.diff(offsets).tolist()),
        compress_ratio=compress_ratio,
        has_compressed=compressed is not None,
        window=window,
        max_model_len=checks.count(max_model_len, "max_model_len", least=1),
        max_num_batched_tokens=checks.count(
            max_num_batched_tokens, "max_num_batched_tokens", least=1
        ),
        chunk_size=checks.count(chunk_size, "chunk_size", least=1),
    )
    width = 0
    if compressed is not None and topk_indices is None:
        width = c128_width(max(bounds, default=0), max_model_len, compress_ratio)
    _check_list_width(topk_indices, width, window, max_image_tokens)
    if lengths_known:
        checks.check_spans(
            query_start_loc, seq_lens, spans, span_offsets, max_image_tokens, name="image_spans"
        )
        _check_chosen(topk_indices, query_start_loc, seq_lens, compress_ratio)
        _check_pages(
            swa, swa_block_table, compressed, compressed_block_table, request, np.asarray(seq_lens)
        )
    arrays = {
        "q": q,
        "swa_block_table": swa_block_table,
        "compressed_block_table": compressed_block_table,
        "topk_indices": topk_indices,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "attn_sink": attn_sink,
    }
    given = {name: array for name, array in arrays.items() if array is not None}
    return Arguments(
        arrays=ChunkArrays(
            **(arrays | {name: _operand(array, name) for name, array in given.items()}),
            swa=swa,
            compressed=compressed,
            spans=spans,
            span_offsets=span_offsets,
        ),
        settings=Settings(
            compress_ratio=compress_ratio,
            window=window,
            max_image_tokens=max_image_tokens,
            all_entries_width=width,
            sm_scale=known_number(sm_scale, "sm_scale"),
            backend=backend,
        ),
        request=request,
        shared=any(map(shares_memory, given.values())),
    )


def _operand(array: Any, name: str) -> Any:
    """An array as a chunk's program takes it: of what is cut by requests, NumPy's stays NumPy's,
    since each cut of one of JAX's is a program."""
    if isinstance(array, np.ndarray) and name in _BY_REQUEST:
        return np.array(array)
    return to_jax(array, name)


def _check_list_width(
    topk_indices: Any, all_entries: int, window: int, max_image_tokens: int
) -> None:
    topk = {}
    if topk_indices is not None:
        topk = {"topk_indices": int(topk_indices.shape[1])}
    elif all_entries:
        topk = {"topk_indices (None: as many as the longest context has entries)": all_entries}
    rest = {"window": window, "max_image_tokens": max_image_tokens}
    checks.list_width(WIDTH_MULTIPLE, **topk, **rest)


def _spans_of(image_spans: Any, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
    """The images of all requests, and where those of each begin."""
    if image_spans is None:
        image_spans = ((),) * num_requests
    if not isinstance(image_spans, (list, tuple)) or len(image_spans) != num_requests:
        raise ValueError(
            f"image_spans must be a list of the images of each of the {num_requests} requests; "
            f"got {image_spans!r}"
        )
    return image_spans_csr(image_spans)


def _check_topk_rows(topk_indices: Any, num_tokens: int) -> None:
    if topk_indices is not None:
        rows, _ = checks.int32_shape(topk_indices, "topk_indices", "[T, topk]")
        if rows != num_tokens:
            raise ValueError(
                f"topk_indices must have a row for each of the {num_tokens} tokens of q; got {rows}"
            )


def _check_chosen(
    topk_indices: Any, query_start_loc: Any, seq_lens: Any, compress_ratio: int
) -> None:
    """The entries that tokens chose, where they can be looked at, are ones that they see."""
    if topk_indices is not None and not is_traced(topk_indices):
        tokens = checks.host_tokens(query_start_loc, seq_lens)
        limits = np.full(seq_lens.shape[0], checks.INT32_MAX)
        checks.check_entries(topk_indices, tokens, compress_ratio, limits, "2^31 - 1")


def _check_q(q: Any) -> tuple[int, int]:
    num_tokens, num_heads, d = shape_of(q, "q", "[T, H, 512]", ("bfloat16",))
    if d != D_V:
        raise NotImplementedError(f"q must have a width of {D_V}, as V4 has; got {d}")
    if not 1 <= num_heads <= MAX_HEADS:
        raise NotImplementedError(f"q must have 1 to {MAX_HEADS} heads; got {num_heads}")
    return num_tokens, num_heads


def _check_cache(cache: Any, name: str, block_table: Any, num_requests: int) -> None:
    if not isinstance(cache, PagedKV):
        raise ValueError(f"{name} must be a PagedKV; got {type(cache).__name__}")
    if cache.d != D_V:
        raise ValueError(
            f"{name} must hold rows of {D_V}, as V4 does; got {cache.kv_format}, of {cache.d}"
        )
    rows, _ = checks.int32_shape(block_table, f"{name}_block_table", "[n, columns]")
    if rows != num_requests:
        raise ValueError(
            f"{name}_block_table must have a row for each of the {num_requests} requests; "
            f"got {rows}"
        )


def _check_compressed(
    compress_ratio: int, compressed: Any, block_table: Any, topk_indices: Any
) -> None:
    if compressed is None:
        for value, name in (
            (block_table, "compressed_block_table"),
            (topk_indices, "topk_indices"),
        ):
            if value is not None:
                raise ValueError(
                    f"{name} must be None without a compressed cache; got {type(value).__name__}"
                )
        if compress_ratio > 1:
            raise ValueError(
                f"compressed must be given for a layer of compress_ratio {compress_ratio}; "
                "got None, which a ratio of 0 or 1 may have"
            )
    elif block_table is None:
        raise ValueError("compressed_block_table must be given with a compressed cache; got None")
    elif not compress_ratio:
        raise ValueError("compress_ratio must be at least 1 with a compressed cache; got 0")


def check_fused(swa: PagedKV, compressed: PagedKV | None) -> None:
    """What attending to the pages themselves asks of the caches, by their names here."""
    slots = 0
    for cache, name in ((swa, "swa"), (compressed, "compressed")):
        if cache is None:
            continue
        if cache.kv_format != FORMAT.name:
            raise NotImplementedError(
                f"{name} must be {FORMAT.name} with fused; got {cache.kv_format}"
            )
        slots += cache.num_slots
    if slots > checks.INT32_MAX:
        raise ValueError(
            "swa and compressed must have at most 2^31 - 1 slots together with fused, which "
            f"numbers them in one int32; got {slots}"
        )


def _host_offsets(query_start_loc: Any, num_tokens: int) -> np.ndarray:
    if is_traced(query_start_loc):
        raise ValueError(
            "query_start_loc must be known when the call is made, as chunks are planned by it; got "
            "a traced array"
        )
    checks.check_offsets(query_start_loc)
    offsets = np.asarray(query_start_loc, np.int64)
    if offsets[-1] - offsets[0] != num_tokens:
        raise ValueError(
            f"q must have a row for each of the {offsets[-1] - offsets[0]} tokens of "
            f"query_start_loc; got {num_tokens}"
        )
    return offsets


def _host_bounds(seq_lens: Any, seq_lens_bound: Any, num_requests: int) -> tuple[int, ...]:
    if seq_lens_bound is None:
        if is_traced(seq_lens):
            raise ValueError(
                "seq_lens_bound must be given where seq_lens is traced, as chunks are planned by "
                "lengths that the host knows; got None"
            )
        return tuple(np.asarray(seq_lens).tolist())
    if is_traced(seq_lens_bound):
        raise ValueError("seq_lens_bound must be known when the call is made; got a traced array")
    checks.one_each(seq_lens_bound, "seq_lens_bound", num_requests)
    return tuple(np.asarray(seq_lens_bound).tolist())


def _check_bounds(seq_lens: Any, bounds: tuple[int, ...]) -> None:
    contexts = np.asarray(seq_lens, np.int64)
    for i in np.flatnonzero(contexts > np.asarray(bounds, np.int64))[:1]:
        raise ValueError(
            f"seq_lens_bound must be an upper bound of seq_lens; got {bounds[i]} for request {i} "
            f"of {contexts[i]} tokens"
        )


def _check_pages(
    swa: PagedKV,
    swa_block_table: Any,
    compressed: PagedKV | None,
    compressed_block_table: Any,
    request: PlanRequest,
    seq_lens: np.ndarray,
) -> None:
    """The pages that are gathered for requests with tokens. No token reads another one's."""
    for i, (context, query) in enumerate(zip(seq_lens.tolist(), request.query_lens, strict=True)):
        if not query:
            continue
        first = max(context - query - (request.window - 1), 0)
        needed = [(swa, "swa_block_table", swa_block_table, np.arange(first, context))]
        if compressed is not None:
            entries = np.arange(context // request.compress_ratio)
            needed += [(compressed, "compressed_block_table", compressed_block_table, entries)]
        for cache, name, table, wanted in needed:
            if not is_traced(table):
                checks.check_table(table, name, cache.page_size, cache.num_slots, i, wanted)
