"""Some tokens of a batch, attended to where they are: no copy of their queries or results."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jax_impl.prefill.sparse.result import SparsePrefillResult


class BatchRows(NamedTuple):
    """The tokens of a batch of T from first_token on; how many, whoever holds it knows.

    q: [T, H, D] bfloat16, the batch's queries.
    result: refs to the batch's results, of which these tokens' rows are to be written.
    first_token: int32 scalar.
    """

    q: jax.Array
    result: SparsePrefillResult
    first_token: jax.Array

    def queries(self, num_tokens: int) -> jax.Array:
        """The tokens' queries [num_tokens, H, D]: a copy, unless they are all of the batch's."""
        if num_tokens == self.q.shape[0]:
            return self.q
        return jax.lax.dynamic_slice_in_dim(self.q, self.first_token, num_tokens)

    def write(self, part: SparsePrefillResult) -> None:
        for ref, rows in zip(self.result, part, strict=True):
            ref[...] = jax.lax.dynamic_update_slice_in_dim(ref[...], rows, self.first_token, 0)

    def written(self) -> SparsePrefillResult:
        """The batch's results as they are now; the refs are not to be used after it."""
        return SparsePrefillResult(*map(jax.freeze, self.result))


class BatchRowsOnHost(BatchRows):
    """The same with NumPy's arrays, outside jit, which are written to where they are."""

    __slots__ = ()

    def queries(self, num_tokens: int) -> np.ndarray:
        return self.q[self.first_token :][:num_tokens]

    def write(self, part: SparsePrefillResult) -> None:
        for whole, rows in zip(self.result, part, strict=True):
            whole[self.first_token :][: len(rows)] = rows

    def written(self) -> SparsePrefillResult:
        return self.result
