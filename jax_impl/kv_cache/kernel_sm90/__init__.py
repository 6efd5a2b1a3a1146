"""The gather on Hopper: pages to a bfloat16 workspace, in place, through registers alone.

Contract. Rows [offset, offset + gather_len) of each request are written, every other row is left
as it is (positions.py). Page and offset within the page stay apart until they are added up as a
64-bit address. Pages, columns and rows that there aren't are never touched: page numbers and
columns act as the nearest there is, rows are left out.

Algorithm. A thread block has four warps, each of which copies a few neighbouring rows: looks up
their pages, loads all their bytes, multiplies codes with scales in float32, rounds to bfloat16
and stores (pieces.py). Nothing is staged in shared memory and no barrier is needed.

Cost. Every byte of a token is read once and every byte of its row written once, in whole sectors
of 32 bytes: 584 + 1024 bytes a token of V4. Thread blocks without rows end at once.

Not done: the last eight pieces of a 576-wide row take a step of their own, in which three lanes of
four have nothing to do.
"""

from jax_impl.kv_cache.kernel_sm90.launch import gather, gather_into
from jax_impl.kv_cache.kernel_sm90.problem import Config

__all__ = ["Config", "gather", "gather_into"]
