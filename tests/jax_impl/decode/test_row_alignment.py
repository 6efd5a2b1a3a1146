"""A tile of queries is copied in groups of eight rows: on a GPU one that began between two groups
would be given the rows of its neighbour, which no interpreter shows.
"""

import itertools

import numpy as np
import pytest

from jax_impl.decode.kernel_sm90 import work
from jax_impl.decode.plan import plan_decode


@pytest.mark.parametrize("heads", [1, 3, 6, 8, 12, 24, 96, 128])
def test_every_tile_begins_with_a_group_of_rows(heads: int) -> None:
    query_lens, total_lens = (6, 2, 1, 0, 5), (20, 9, 4, 0, 700)
    offsets = list(itertools.accumulate(query_lens, initial=0))
    plan = plan_decode(offsets, total_lens, total_lens, max_query_len=6, heads=heads)
    assert len(plan.items) >= 4
    assert not (np.asarray(plan.items)[..., work.FIRST_ROW] % work.ROW_ALIGNMENT).any()
    assert not (np.asarray(plan.merges)[..., work.MERGE_FIRST_ROW] % work.ROW_ALIGNMENT).any()


def test_a_token_takes_up_its_heads_and_padding() -> None:
    assert [work.rows_of_token(heads) for heads in (1, 6, 8, 9, 96, 128)] == [8, 8, 8, 16, 96, 128]
