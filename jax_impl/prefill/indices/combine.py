"""The list of keys of each prefill token: the compressed entries that it chose, then its window.

One list, two ways of writing it down. `combine_topk_swa_indices` names rows of the workspace into
which both caches were gathered, `combine_topk_swa_slots` the slots of the paged caches themselves;
entry by entry they name the same keys in the same order (vLLM 0.33.0, models/deepseek_v4/common/
ops/cache_utils.py). A token at position pos of its request lists

    topk_indices[t, c]            for c < tl,   tl = min((pos + 1) // compress_ratio, topk)
    positions first to pos + right,             first = max(pos - max(window - 1, left), 0)

where left and right are how far it sees within its image, 0 outside of images. The window follows
the entries at once, and everything behind it is -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jax_impl.arrays import to_jax
from jax_impl.prefill.indices import checks
from jax_impl.prefill.indices.keys import combined_rows, combined_slots
from jax_impl.prefill.indices.layout import check_gather, check_lists, check_tables, layout_of
from jax_impl.prefill.indices.slots import no_table
from jax_impl.prefill.indices.tokens import IndexLists, nothing_listed

if TYPE_CHECKING:
    from jaxtyping import Int32


def combine_topk_swa_indices(
    topk_indices: Int32[Any, "T topk"] | None,
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    gather_lens: Int32[Any, " n"],
    *,
    workspace_rows: int,
    compressed_rows: int,
    compress_ratio: int,
    topk: int | None = None,
    window: int = 128,
    image_left: Int32[Any, " T"] | None = None,
    image_right: Int32[Any, " T"] | None = None,
    max_image_tokens: int = 0,
    num_tokens: int | None = None,
    validate: bool = True,
) -> IndexLists:
    """The lists (see this module's head) as rows of a chunk's workspace.

    The workspace [n, M, 512], M = workspace_rows, is seen as [n * M, 512]. Request b has its
    compressed entries from row M b on and, from row M b + N on (N = compressed_rows), its last
    gather_lens[b] positions; the rows between may hold anything and are never named.

    Args:
      topk_indices: [T, topk] int32, compressed entries by number within their request, in any
        order; those in a row's first tl columns count. None without compressed entries.
      query_start_loc: [n + 1] int32; the first entry may be above 0, rows count from it.
      seq_lens: [n] int32, tokens of context, this step's included.
      gather_lens: [n] int32, window rows that were gathered.
      workspace_rows, compressed_rows: M and N of the chunk. N may exceed what a request has.
      compress_ratio: positions of a compressed entry; only looked at with topk above 0.
      topk: how many columns of topk_indices are used, static; None: all.
      window: positions that a token sees, its own included; static.
      image_left, image_right: [T] int32 of `image_visibility`; None: no images.
      max_image_tokens: most positions of an image, static.
      num_tokens: T, static, where neither topk_indices nor image_left tells it; None outside jit:
        the requests' tokens.
      validate: looks at values outside jit, which waits for them.

    Returns:
      IndexLists(indices [T, C] int32, lengths [T] int32), C = combined_width(topk, window,
      max_image_tokens). Rows past the requests' tokens: all -1, length 0. An entry that is listed
      twice stays twice.

    Raises:
      ValueError: an argument of the wrong type or range. And, outside jit: an entry in the first
        tl columns that is negative (for b > 0 it would name a row of request b - 1), not visible
        or at N or above; a window that begins before the gathered rows (replay_start above 0) or
        goes past them; gathered rows that exceed M - N; an image's positions that are not this
        step's; a list longer than C. Inside jit no value can be looked at: there, what is not a
        row of the token's own request is -1, a hole that no attention reads, and a length is cut
        at C.
    """
    layout = layout_of(
        topk_indices, query_start_loc, seq_lens, image_left, image_right,
        compress_ratio=compress_ratio, topk=topk, window=window,
        max_image_tokens=max_image_tokens, num_tokens=num_tokens,
    )  # fmt: skip
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    checks.one_each(gather_lens, "gather_lens", num_requests)
    workspace_rows = checks.count(workspace_rows, "workspace_rows")
    compressed_rows = checks.count(compressed_rows, "compressed_rows")
    if compressed_rows > workspace_rows:
        raise ValueError(
            f"compressed_rows must be at most workspace_rows, {workspace_rows}; "
            f"got {compressed_rows}"
        )
    if num_requests * workspace_rows > checks.INT32_MAX:
        raise ValueError(
            f"workspace_rows times {num_requests} requests must be at most 2^31 - 1, as indices "
            f"are int32; got {num_requests * workspace_rows}"
        )
    if checks.known(validate, gather_lens, *layout.arrays):
        tokens, first = check_lists(layout, compressed_rows, "compressed_rows")
        check_gather(gather_lens, seq_lens, workspace_rows - compressed_rows)
        begin = np.asarray(seq_lens, np.int64) - np.asarray(gather_lens, np.int64)
        checks.check_gathered(tokens, first, begin)
    if not num_requests:
        return nothing_listed(layout.num_tokens, layout.width)
    return combined_rows(
        *layout.as_jax(),
        to_jax(gather_lens, "gather_lens"),
        workspace_rows,
        compressed_rows,
        layout.compress_ratio,
        layout.window,
        width=layout.width,
    )


def combine_topk_swa_slots(
    topk_indices: Int32[Any, "T topk"] | None,
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    swa_block_table: Int32[Any, "n columns"],
    compressed_block_table: Int32[Any, "n columns"] | None = None,
    *,
    swa_page_size: int,
    swa_num_slots: int,
    compressed_page_size: int = 1,
    compressed_num_slots: int = 0,
    compress_ratio: int,
    topk: int | None = None,
    window: int = 128,
    image_left: Int32[Any, " T"] | None = None,
    image_right: Int32[Any, " T"] | None = None,
    max_image_tokens: int = 0,
    num_tokens: int | None = None,
    validate: bool = True,
) -> IndexLists:
    """The lists (see this module's head) as slots of the two paged caches, with no workspace.

    Slots of the compressed cache come first: slot s of the sliding-window cache has the number
    compressed_num_slots + s, as `jax_impl.sparse_prefill_paged` counts. Without a compressed cache
    the numbers are the window cache's own. Order, width and lengths are those of
    `combine_topk_swa_indices`.

    Args:
      swa_block_table, compressed_block_table: [n, columns] int32, each cache's own. Entry or
        position x of a request is token x % P of page table[request, x // P], P being the cache's
        page size. Columns that no list needs may hold anything.
      swa_page_size, compressed_page_size: tokens (entries) of a page.
      swa_num_slots, compressed_num_slots: pages times page size of each cache.
      The other arguments: as in `combine_topk_swa_indices`.

    Raises:
      ValueError: as in `combine_topk_swa_indices`; or a page that a list needs and that is outside
        of its block table or of its cache. Inside jit such a slot is -1.
    """
    layout = layout_of(
        topk_indices, query_start_loc, seq_lens, image_left, image_right,
        compress_ratio=compress_ratio, topk=topk, window=window,
        max_image_tokens=max_image_tokens, num_tokens=num_tokens,
    )  # fmt: skip
    num_requests = checks.batch_of(query_start_loc, seq_lens)
    if compressed_block_table is None and layout.topk:
        raise ValueError(
            f"compressed_block_table must be given for the {layout.topk} columns of topk_indices; "
            "got None"
        )
    caches = [("swa", swa_block_table, swa_page_size, swa_num_slots)]
    caches += [("compressed", compressed_block_table, compressed_page_size, compressed_num_slots)]
    for name, _, page_size, num_slots in caches:
        page_size = checks.count(page_size, f"{name}_page_size", least=1)
        if checks.count(num_slots, f"{name}_num_slots") % page_size:
            raise ValueError(
                f"{name}_num_slots must be whole pages of {page_size}; got {num_slots}"
            )
    caches = [cache for cache in caches if cache[1] is not None]
    total_columns = 0
    for name, table, _, _ in caches:
        rows, columns = checks.int32_shape(table, f"{name}_block_table", "[n, columns]")
        if rows != num_requests:
            raise ValueError(
                f"{name}_block_table must have a row for each of the {num_requests} requests; "
                f"got {rows}"
            )
        total_columns += columns
    checks.check_columns(total_columns, "swa_block_table and compressed_block_table together")
    if swa_num_slots + compressed_num_slots > checks.INT32_MAX:
        raise ValueError(
            "swa_num_slots and compressed_num_slots must be at most 2^31 - 1 together, as slots "
            f"are int32; got {swa_num_slots + compressed_num_slots}"
        )
    tables = [table for _, table, _, _ in caches]
    if checks.known(validate, *tables, *layout.arrays):
        check_lists(layout, checks.INT32_MAX, "2^31 - 1")
        check_tables(layout, caches)
    if not num_requests:
        return nothing_listed(layout.num_tokens, layout.width)
    if compressed_block_table is None:
        compressed_block_table = no_table(num_requests)
    return combined_slots(
        *layout.as_jax(),
        to_jax(swa_block_table, "swa_block_table"),
        to_jax(compressed_block_table, "compressed_block_table"),
        swa_page_size,
        swa_num_slots,
        compressed_page_size,
        compressed_num_slots,
        layout.compress_ratio,
        layout.window,
        width=layout.width,
    )
