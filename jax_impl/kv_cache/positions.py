"""Which token a row of the workspace holds; the one place where the rule stands (vLLM 0.33.0,
models/deepseek_v4/common/ops/cache_utils.py, `dequantize_and_gather_k_cache`).

    position = seq_len - gather_len + (row - offset),   0 <= row - offset < gather_len

What can't be right is never a reason to touch a row: lengths are looked at outside jit, and
inside it a row outside the workspace, or one for a token before the first, isn't there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_impl.arrays import namespace


class GatheredRows(NamedTuple):
    """The rows of one request; everything is an int32, traced or NumPy's or JAX's."""

    seq_len: Any
    gather_len: Any
    offset: Any
    num_rows: int  # of the workspace

    @property
    def first(self) -> Any:
        """Row of the workspace that holds the first gathered token for which there is a row."""
        return namespace(self.offset).clip(self.offset, 0, self.num_rows)

    @property
    def count(self) -> Any:
        """Rows from the first on that there are in the workspace."""
        xp = namespace(self.gather_len, self.offset)
        behind = xp.maximum(self.gather_len, 0) + xp.minimum(self.offset, 0)
        return xp.clip(behind, 0, self.num_rows - self.first)

    def position(self, row: Any) -> Any:
        return self.seq_len - self.gather_len + (row - self.offset)

    def has(self, row: Any) -> Any:
        """Whether a row of the workspace is to be written."""
        within = (row >= self.first) & (row < self.first + self.count)
        return within & (self.position(row) >= 0)
