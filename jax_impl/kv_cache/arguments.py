"""Checks what a caller hands to the gather, before anything converts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import is_traced, shape_of, shares_memory, to_jax
from jax_impl.kv_cache.paged import PagedKV, check_paged

_INT32 = ("int32",)


class Arguments(NamedTuple):
    """The checked arguments as JAX arrays; the workspace is an array, or a ref to one."""

    paged: PagedKV
    block_table: jax.Array  # [n, columns] int32
    seq_lens: jax.Array  # [n] int32
    gather_lens: jax.Array  # [n] int32
    workspace: Any  # [n, M, D] bfloat16
    offset: Any  # int, or [] int32
    shared: bool  # some lie in memory that the caller can still write to

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read from, or nowhere to write to."""
        return 0 in (*self.workspace.shape, *self.block_table.shape, self.paged.num_slots)


def check(
    paged: Any,
    block_table: Any,
    seq_lens: Any,
    workspace: Any,
    *,
    gather_lens: Any,
    offset: Any,
) -> Arguments:
    """Raises ValueError for what can't be served, else converts."""
    check_paged(paged)
    requests, rows, width = _workspace_shape(workspace)
    if width != paged.d:
        raise ValueError(
            f"workspace must be {paged.d} wide for a {paged.kv_format} cache; got {width}"
        )
    table_rows, _ = shape_of(block_table, "block_table", "[n, columns]", _INT32)
    lens = {"seq_lens": shape_of(seq_lens, "seq_lens", "[n]", _INT32)[0]}
    if gather_lens is not None:
        lens["gather_lens"] = shape_of(gather_lens, "gather_lens", "[n]", _INT32)[0]
    for name, got in (("block_table", table_rows), *lens.items()):
        if got != requests:
            raise ValueError(
                f"{name} must have an entry for each of the workspace's {requests} requests; "
                f"got {got}"
            )
    arrays = [array for array in (block_table, seq_lens, gather_lens) if array is not None]
    sources = arrays if isinstance(workspace, jax.Ref) else [*arrays, workspace]
    checked = Arguments(
        paged=paged,
        block_table=to_jax(block_table, "block_table"),
        seq_lens=to_jax(seq_lens, "seq_lens"),
        gather_lens=to_jax(seq_lens if gather_lens is None else gather_lens, "gather_lens"),
        workspace=workspace if isinstance(workspace, jax.Ref) else to_jax(workspace, "workspace"),
        offset=_offset(offset, rows),
        shared=any(map(shares_memory, sources)),
    )
    if not is_traced(checked.seq_lens, checked.gather_lens):
        _check_lengths(checked, rows, given="seq_lens" if gather_lens is None else "gather_lens")
        if not is_traced(checked.block_table):
            _check_table(checked)
    return checked


def _workspace_shape(workspace: Any) -> tuple[int, int, int]:
    if isinstance(workspace, jax.Ref):
        if workspace.dtype != jnp.bfloat16 or len(workspace.shape) != 3:
            raise ValueError(
                f"workspace must be a ref to bfloat16 [n, M, D]; got {workspace.dtype} "
                f"{list(workspace.shape)}"
            )
        return workspace.shape
    requests, rows, width = shape_of(workspace, "workspace", "[n, M, D]", ("bfloat16",))
    return requests, rows, width


def _offset(offset: Any, rows: int) -> Any:
    if is_traced(offset):
        shape_of(offset, "offset", "[]", _INT32)
        return offset
    known = np.asarray(offset) if not isinstance(offset, (bool, np.bool_)) else np.asarray("")
    if known.ndim or known.dtype.kind not in "iu" or not 0 <= known <= rows:
        raise ValueError(
            f"offset must be a row of the workspace or its end, 0 to {rows}; got {offset!r}"
        )
    return int(known)


def _check_lengths(arguments: Arguments, rows: int, *, given: str) -> None:
    seq, gather = np.asarray(arguments.seq_lens), np.asarray(arguments.gather_lens)
    for b in np.flatnonzero(seq < 0)[:1]:
        raise ValueError(f"seq_lens must not be negative; got {seq[b]} for request {b}")
    for b in np.flatnonzero((gather < 0) | (gather > seq))[:1]:
        raise ValueError(
            f"gather_lens must lie between 0 and the request's seq_len, {seq[b]}; got "
            f"{gather[b]} for request {b}"
        )
    if is_traced(arguments.offset):
        return
    room = rows - int(arguments.offset)
    for b in np.flatnonzero(gather > room)[:1]:
        raise ValueError(
            f"{given} must fit the {room} rows of the workspace from offset "
            f"{int(arguments.offset)} on; got {gather[b]} for request {b}"
        )


def _check_table(arguments: Arguments) -> None:
    """Every page that a gathered token lies on must be in the table, and in the cache."""
    paged = arguments.paged
    seq, gather = np.asarray(arguments.seq_lens), np.asarray(arguments.gather_lens)
    table = np.asarray(arguments.block_table)
    columns, page_size = table.shape[1], paged.page_size
    needed = np.where(gather > 0, -(-seq.astype(np.int64) // page_size), 0)
    for b in np.flatnonzero(needed > columns)[:1]:
        raise ValueError(
            f"block_table must have a column for each of the {needed[b]} pages of {page_size} "
            f"tokens of request {b}; got {columns}"
        )
    column = np.arange(columns)
    first = (seq - gather) // page_size
    used = (column >= first[:, None]) & (column < needed[:, None])
    for b, c in np.argwhere(used & ((table < 0) | (table >= paged.num_pages)))[:1]:
        raise ValueError(
            f"block_table must name pages of the cache, 0 to {paged.num_pages - 1}, where a "
            f"request has tokens to gather; got {table[b, c]} for page {c} of request {b}"
        )
