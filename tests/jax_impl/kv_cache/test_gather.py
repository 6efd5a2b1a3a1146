"""The gather on every backend that a CPU has, against the rule, token by token."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.kv_cache import PagedKV, empty_cache, gather_kv, gather_kv_into
from tests.jax_impl.kv_cache.model import (
    BF16,
    WIDTHS,
    as_paged,
    bits,
    gathered_bits,
    int32,
    page_bytes,
    poison,
    random_cache,
    same_bits,
)


def check(
    paged: PagedKV, table: Any, seq: Any, workspace: Any, backend: str, **options: Any
) -> Any:
    got = gather_kv(
        paged, int32(table), int32(seq), workspace, backend=backend,
        **{k: int32(v) if k == "gather_lens" else v for k, v in options.items()},
    )  # fmt: skip
    assert got.shape == workspace.shape and got.dtype == jnp.bfloat16
    assert same_bits(got, gathered_bits(paged, table, seq, workspace, **options))
    return got


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_tokens_come_from_their_pages_and_other_rows_stay(backend, name, page_size):
    """A long request over all pages, the end of one that straddles two, one token, and none."""
    seq = [19, page_size + 5, 1, 7]
    paged = random_cache(name, -(-max(seq) // page_size) + 3, page_size)
    pages = np.random.default_rng(0).permutation(paged.num_pages)
    table = np.stack([np.roll(pages, shift) for shift in range(4)])
    workspace = poison(4, 25, paged.d)
    lens = [19, 7 if page_size > 1 else 5, 1, 0]
    got = check(paged, table, seq, workspace, backend, gather_lens=lens, offset=4)
    untouched = np.ones((4, 25), bool)
    for b, rows in enumerate(lens):
        untouched[b, 4 : 4 + rows] = False
    np.testing.assert_array_equal(bits(got)[untouched], bits(workspace)[untouched])


def test_all_tokens_are_gathered_where_no_length_is_given(backend):
    paged = random_cache("v4-fp8", 4, 4)
    check(paged, [[3, 0, 2], [1, 3, 0]], [9, 12], poison(2, 12, 512), backend)


@pytest.mark.parametrize("offset", [0, 3, 20])
def test_rows_begin_at_the_offset(backend, offset):
    paged = random_cache("v4-fp8", 4, 4)
    check(paged, [[1, 2]], [8], poison(1, 28, 512), backend, offset=offset)


def test_more_rows_than_a_block_and_than_a_thread_block(backend):
    paged = random_cache("bf16", 8, 64)
    table = [[7, 0, 3, 1, 6], [2, 5, 4, 0, 1]]
    check(paged, table, [300, 290], poison(2, 311, 512), backend, gather_lens=[270, 41], offset=17)


def test_the_two_halves_of_a_workspace_are_filled_one_after_the_other(backend):
    """As a chunk does: N compressed rows, then window rows, from caches of different pages.

    The second request is too short for a compressed entry; the plan's N may lie above what any
    request has. Rows between keep their NaN.
    """
    compressed, window = random_cache("v4-fp8", 30, 2), random_cache("v4-fp8", 6, 64, seed=1)
    seq, ratio, n = np.array([203, 3]), 8, 40
    workspace = poison(2, n + 130, 512)
    tables = np.arange(26).reshape(2, 13), [[3, 0, 5, 1], [2, 4, 0, 0]]
    first = check(compressed, tables[0], seq // ratio, workspace, backend)
    got = check(window, tables[1], seq, first, backend, gather_lens=[130, 3], offset=n)
    stale = bits(got)[1, :n]
    np.testing.assert_array_equal(stale, bits(workspace)[1, :n])
    np.testing.assert_array_equal(bits(got)[0, 25:n], bits(workspace)[0, 25:n])


def test_pages_that_hold_no_gathered_token_may_be_anything(backend):
    """Garbage entries before the first page and behind the last, and NaN in what they name."""
    paged = random_cache("v4-fp8", 5, 4)
    pages = page_bytes(paged)
    pages[4] = 0xFF
    paged = as_paged(pages, "v4-fp8", 4)
    table = [[10**6, 2, 0, -5, 4], [4, 4, 3, 2**31 - 1, -(2**31)]]
    got = check(paged, table, [11, 12], np.zeros((2, 9, 512), BF16), backend, gather_lens=[7, 4])
    assert not np.isnan(np.asarray(got, np.float32)[:, 7:]).any()


def test_inputs_are_left_as_they_are(backend):
    paged, workspace = random_cache("v4-fp8", 2, 4), jnp.asarray(poison(1, 9, 512))
    before = bits(workspace).copy(), page_bytes(paged)
    check(paged, [[1, 0]], [8], workspace, backend)
    np.testing.assert_array_equal(bits(workspace), before[0])
    np.testing.assert_array_equal(page_bytes(paged), before[1])


@pytest.mark.parametrize("shape", [(0, 4, 512), (2, 0, 512)])
def test_a_workspace_without_rows_is_returned_without_a_launch(backend, shape):
    paged = random_cache("v4-fp8", 2, 4)
    lens = np.zeros(shape[0], np.int32)
    got = gather_kv(
        paged, np.zeros((shape[0], 1), np.int32), lens, np.zeros(shape, BF16), backend=backend
    )
    assert got.shape == shape


@pytest.mark.parametrize(("num_pages", "columns"), [(0, 2), (2, 0)])
def test_an_empty_cache_or_table_serves_requests_without_tokens(backend, num_pages, columns):
    paged = empty_cache("v4-fp8", num_pages=num_pages, page_size=4)
    workspace = poison(1, 3, 512)
    table = np.zeros((1, columns), np.int32)
    got = gather_kv(paged, table, int32([0]), workspace, backend=backend)
    np.testing.assert_array_equal(bits(got), bits(workspace))
    with pytest.raises(ValueError, match="block_table must"):
        gather_kv(paged, table, int32([1]), workspace, backend=backend)


def test_inside_jit_what_is_out_of_range_is_read_as_documented(backend):
    paged = random_cache("v4-fp8", 3, 4)
    table = int32([[-3, 1, 99], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    seq = int32([12, 18, 3, 8, -4])
    gather = int32([12, 18, 6, 50, 7])
    workspace = poison(5, 20, 512)
    traced = jax.jit(lambda *a: gather_kv(*a[:4], gather_lens=a[4], offset=a[5], backend=backend))
    got = bits(traced(paged, table, seq, workspace, gather, jnp.int32(1)))

    expected = bits(workspace).copy()
    whole = gathered_bits(paged, [[0, 1, 2]], [12], poison(1, 12, 512))[0]
    expected[0, 1:13] = whole  # pages -3 and 99 act as 0 and 2
    expected[1, 1:13] = whole
    expected[1, 13:19] = whole[[8, 9, 10, 11, 8, 9]]  # columns behind the last act as the last
    expected[2, 4:7] = whole[:3]  # rows for positions -3 to -1 aren't there
    # Rows for positions -42 to -24 aren't either, nor is there room for those from 0 on; and
    # the last request has none.
    assert same_bits(got, expected)


@pytest.mark.parametrize("offset", [-1, -2, -5, -(2**31), 18, 21, 2**31 - 1])
def test_inside_jit_rows_outside_the_workspace_are_left_out(backend, offset):
    """Row offset + i holds position i, wherever the workspace begins and ends."""
    paged = random_cache("v4-fp8", 3, 4)
    workspace = poison(1, 20, 512)
    traced = jax.jit(lambda at: gather_kv(
        paged, int32([[0, 1, 2]]), int32([5]), workspace, offset=at, backend=backend
    ))  # fmt: skip
    tokens = gathered_bits(paged, [[0, 1, 2]], [5], poison(1, 5, 512))[0]
    expected = bits(workspace).copy()
    for i, token in enumerate(tokens):
        if 0 <= offset + i < 20:
            expected[0, offset + i] = token
    assert same_bits(traced(offset), expected)


def test_a_ref_is_filled_from_two_caches(backend):
    first, second = random_cache("v4-fp8", 4, 2), random_cache("v4-fp8", 3, 64, seed=2)
    workspace = poison(2, 40, 512)
    tables = int32([[0, 1], [3, 2]]), int32([[1], [2]])
    lens = int32([4, 3]), int32([30, 64])

    @jax.jit
    def fill(first, second, workspace):
        ref = jax.new_ref(workspace)
        gather_kv_into(first, tables[0], lens[0], ref, backend=backend)
        gather_kv_into(
            second, tables[1], lens[1], ref, gather_lens=int32([30, 20]), offset=7,
            backend=backend,
        )  # fmt: skip
        return jax.freeze(ref)

    expected = gathered_bits(first, tables[0], lens[0], workspace)
    expected = gathered_bits(second, tables[1], lens[1], expected, [30, 20], 7)
    assert same_bits(fill(first, second, workspace), expected)

    ref = jax.new_ref(jnp.asarray(workspace))
    gather_kv_into(first, tables[0], lens[0], ref, backend=backend)
    assert same_bits(ref[...], gathered_bits(first, tables[0], lens[0], workspace))


def test_one_program_serves_all_lengths_tables_and_offsets():
    paged, workspace = random_cache("v4-fp8", 4, 4), poison(2, 16, 512)
    traced = []

    @jax.jit
    def gather(paged, table, seq, lens, workspace, offset):
        traced.append(None)
        return gather_kv(
            paged, table, seq, workspace, gather_lens=lens, offset=offset, backend="xla"
        )

    for seq, lens, offset in (([9, 4], [3, 4], 0), ([16, 1], [12, 0], 2)):
        table = int32([[1, 2, 3, 0], [0, 3, 2, 1]])
        got = gather(paged, table, int32(seq), int32(lens), workspace, jnp.int32(offset))
        assert same_bits(got, gathered_bits(paged, table, seq, workspace, lens, offset))
    assert len(traced) == 1


def test_the_plain_gather_needs_little_beside_the_workspace():
    paged = empty_cache("v4-fp8", num_pages=50, page_size=64)
    workspace = jax.ShapeDtypeStruct((4, 8000, 512), jnp.bfloat16)
    size = 4 * 8000 * 512 * 2

    def gather(paged, workspace, table, seq):
        return gather_kv(paged, table, seq, workspace, backend="xla")

    table, seq = int32(np.zeros((4, 50))), int32([0] * 4)
    program = jax.jit(gather, donate_argnums=1).lower(paged, workspace, table, seq).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes == size
    assert analysis.temp_size_in_bytes < size / 16


PAGED = random_cache("v4-fp8", 3, 4)
GOOD: dict[str, Any] = dict(
    paged=PAGED,
    block_table=int32([[0, 1], [1, 2]]),
    seq_lens=int32([8, 5]),
    workspace=np.zeros((2, 10, 512), BF16),
    gather_lens=int32([8, 2]),
    offset=2,
)


def changed(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


BAD: list[tuple[dict[str, Any], str]] = [
    ({"paged": PAGED.cache}, "paged must be a PagedKV; got ArrayImpl"),
    ({"workspace": np.zeros((2, 10, 576), BF16)}, "workspace must be 512 wide for a v4-fp8 cache"),
    ({"workspace": np.zeros((20, 512), BF16)}, "workspace must be [n, M, D]; got shape [20, 512]"),
    ({"workspace": np.zeros((2, 10, 512), np.float32)}, "workspace must be bfloat16; got float32"),
    ({"block_table": np.zeros((2, 2), np.int64)}, "block_table must be int32; got int64"),
    ({"block_table": int32([[0, 1]])}, "block_table must have an entry for each of the workspace"),
    ({"seq_lens": int32([8, 5, 1])}, "seq_lens must have an entry for each of the workspace's 2"),
    ({"seq_lens": np.array([8, 5])}, "seq_lens must be int32; got int64"),
    ({"gather_lens": int32([1])}, "gather_lens must have an entry for each"),
    ({"seq_lens": int32([8, -1]), "gather_lens": None}, "seq_lens must not be negative; got -1"),
    ({"gather_lens": int32([8, 6])}, "gather_lens must lie between 0 and the request's seq_len, 5"),
    ({"gather_lens": int32([-1, 0])}, "gather_lens must lie between 0"),
    ({"offset": 3}, "gather_lens must fit the 7 rows of the workspace from offset 3 on; got 8"),
    ({"offset": 3, "gather_lens": None}, "seq_lens must fit the 7 rows of the workspace"),
    ({"offset": -1}, "offset must be a row of the workspace or its end, 0 to 10; got -1"),
    ({"offset": 11}, "offset must be a row of the workspace or its end, 0 to 10; got 11"),
    ({"offset": 1.0}, "offset must be a row of the workspace"),
    ({"offset": True}, "offset must be a row of the workspace"),
    ({"block_table": int32([[0], [1]])}, "block_table must have a column for each of the 2 pages"),
    ({"block_table": int32([[0, 3], [1, 2]])}, "block_table must name pages of the cache, 0 to 2"),
    ({"block_table": int32([[-1, 1], [1, 2]])}, "block_table must name pages of the cache"),
    ({"block_table": int32([[0, 1], [-1, 2]])}, "block_table must name pages of the cache"),
    ({"backend": "cuda"}, "backend must be one of auto, xla, pallas, pallas-interpret; got 'cuda'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_be_gathered_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        gather_kv(**changed(**changes))


def test_the_arguments_that_the_refusals_vary_are_good():
    gather_kv(**GOOD)
    # The second request's first page holds no token that is gathered.
    gather_kv(**changed(block_table=int32([[0, 1], [-9, 2]]), gather_lens=int32([8, 1])))


def test_a_ref_is_asked_for_by_name():
    arguments: dict[str, Any] = {key: GOOD[key] for key in ("paged", "block_table", "seq_lens")}
    for workspace in (GOOD["workspace"], None):
        with pytest.raises(ValueError, match=r"workspace must be a ref .*jax.empty_ref"):
            gather_kv_into(**arguments, workspace=workspace)
    ref = jax.new_ref(jnp.zeros((2, 10, 512), jnp.float32))
    with pytest.raises(ValueError, match="workspace must be a ref to bfloat16"):
        gather_kv_into(**arguments, workspace=ref)


def test_pallas_says_what_it_needs():
    if jax.devices()[0].platform != "cpu":
        pytest.skip("this machine may have it")
    with pytest.raises(NotImplementedError, match="backend='pallas': pallas needs an NVIDIA Hop"):
        gather_kv(**GOOD, backend="pallas")


def test_torch_tensors_are_taken():
    import torch

    arrays = {key: torch.from_numpy(np.array(GOOD[key])) for key in ("block_table", "seq_lens")}
    got = gather_kv(**changed(**arrays))
    np.testing.assert_array_equal(bits(got), bits(gather_kv(**GOOD)))
