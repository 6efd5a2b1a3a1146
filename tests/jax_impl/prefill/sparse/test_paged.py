"""Prefill that reads pages itself: the bits of gather-then-attend, and what it refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import sparse_prefill, sparse_prefill_paged
from jax_impl.kv_cache import PagedKV, empty_cache
from tests.jax_impl.prefill.problems import assert_same_bits, bf16
from tests.jax_impl.prefill.sparse.pages import cache_of, random_caches, random_tokens, rows_of

TOKENS, HEADS, TOPK = 4, 3, 128
SIZES = ((3, 64), (40, 2))
SLOTS = 3 * 64 + 40 * 2
FILLERS = np.asarray([-1, -(2**31), SLOTS, SLOTS + 9, 2**31 - 1], np.int32)


def good_arguments(**changes: Any) -> dict[str, Any]:
    """Holes anywhere, one of them for each filler; a length that ends among valid slots."""
    rng = np.random.default_rng(0)
    slots = rng.integers(0, SLOTS, (TOKENS, TOPK)).astype(np.int32)
    slots[:, ::7] = rng.choice(FILLERS, slots[:, ::7].shape)
    arguments = {
        "q": bf16(rng.standard_normal((TOKENS, HEADS, 512))),
        "caches": random_caches(*SIZES),
        "slots": slots,
        "sm_scale": 512**-0.5,
        "topk_length": np.asarray([TOPK, 100, 1, 0], np.int32),
        "attn_sink": np.linspace(-2, 2, HEADS, dtype=np.float32),
    }
    return arguments | changes


def gather_then_attend(arguments: dict[str, Any]) -> Any:
    others = {k: v for k, v in arguments.items() if k not in ("caches", "slots")}
    rows = rows_of(arguments["caches"])
    return sparse_prefill(kv=rows, indices=arguments["slots"], **others)


@pytest.mark.parametrize(
    "sizes", [((5, 64),), SIZES, ((4, 53), (9, 7)), ((1, 256), (3, 64))], ids=str
)
def test_the_bits_are_those_of_gather_then_attend(backend, sizes):
    caches = random_caches(*sizes)
    total = sum(cache.num_slots for cache in caches)
    slots = np.random.default_rng(1).integers(-9, total + 9, (TOKENS, 200)).astype(np.int32)
    lengths = np.asarray([200, 129, 1, 0], np.int32)
    arguments = good_arguments(caches=caches, slots=slots, topk_length=lengths, backend=backend)
    assert_same_bits(sparse_prefill_paged(**arguments), gather_then_attend(arguments))


def test_every_hole_of_every_kind_is_the_hole_of_sparse_prefill(backend):
    arguments = good_arguments(backend=backend)
    assert_same_bits(sparse_prefill_paged(**arguments), gather_then_attend(arguments))


def test_the_second_cache_begins_behind_the_first(backend):
    """q is 0 and a token sees one slot: its output is that slot's row."""
    caches = random_caches(*SIZES)
    edges = [0, 3 * 64 - 1, 3 * 64, SLOTS - 1]
    slots = np.full((TOKENS, TOPK), -1, np.int32)
    slots[np.arange(TOKENS), [0, 1, 64, 127]] = edges
    arguments = good_arguments(
        q=bf16(np.zeros((TOKENS, HEADS, 512))), caches=caches, slots=slots, topk_length=None,
        attn_sink=None, backend=backend,
    )  # fmt: skip
    out = np.asarray(sparse_prefill_paged(**arguments).out, np.float32)
    np.testing.assert_array_equal(out[:, 0], rows_of(caches)[edges].astype(np.float32))


@pytest.mark.parametrize("scales", [(90, 105), (126, 141), (1, 20)], ids=str)
def test_small_and_large_scales_give_the_bits_of_gather_then_attend(backend, scales):
    """Bytes of 128 and more go another way on a GPU than those below."""
    caches = tuple(
        cache_of(random_tokens(pages * size, number, scales), size)
        for number, (pages, size) in enumerate(SIZES)
    )
    arguments = good_arguments(caches=caches, backend=backend)
    assert_same_bits(sparse_prefill_paged(**arguments), gather_then_attend(arguments))


def test_a_nan_shows_where_its_token_is_attended_to_and_nowhere_else(backend):
    tokens = random_tokens(64, 5)
    tokens[3, 447] = 0xFF  # the last code
    tokens[9, -8] = 0xFF  # the first scale
    tokens[20, 448:450] = 0xFF  # the first bfloat16 column
    slots = np.repeat(np.arange(64, dtype=np.int32)[None], TOKENS, axis=0)
    for row, seen in enumerate((3, 9, 20, None)):
        hidden = [slot for slot in (3, 9, 20) if slot != seen]
        slots[row, hidden] = -1
    arguments = good_arguments(
        caches=(cache_of(tokens, 64),), slots=slots, topk_length=None, backend=backend
    )
    result = sparse_prefill_paged(**arguments)
    is_nan = np.isnan(np.asarray(result.out, np.float32)).all(axis=(1, 2))
    np.testing.assert_array_equal(is_nan, [True, True, True, False])
    np.testing.assert_array_equal(np.isnan(result.lse).all(axis=1), [True, True, True, False])
    assert not np.isnan(np.asarray(result.out, np.float32)[3]).any()
    assert_same_bits(result, gather_then_attend(arguments))


def test_a_batch_cut_into_pieces_gives_the_bits_of_one_call(backend):
    arguments = good_arguments(backend=backend)
    whole = sparse_prefill_paged(**arguments)
    for part in (slice(0, 1), slice(1, 4)):
        cut = {name: arguments[name][part] for name in ("q", "slots", "topk_length")}
        piece = sparse_prefill_paged(**(arguments | cut))
        assert_same_bits(piece, jax.tree.map(lambda x, part=part: x[part], whole))


def test_a_negative_scale_is_applied_to_the_logits(backend):
    arguments = good_arguments(sm_scale=-0.03, backend=backend)
    assert_same_bits(sparse_prefill_paged(**arguments), gather_then_attend(arguments))


def test_caches_without_pages_make_every_slot_a_hole(backend):
    nothing = empty_cache("v4-fp8", num_pages=0, page_size=64)
    for caches in ((nothing,), (nothing, nothing)):
        result = sparse_prefill_paged(**good_arguments(caches=caches, backend=backend))
        np.testing.assert_array_equal(np.asarray(result.out, np.float32), 0)
        np.testing.assert_array_equal(result.lse, np.inf)
        np.testing.assert_array_equal(result.max_logits, -np.inf)


def test_a_cache_without_pages_beside_another_takes_no_slots(backend):
    nothing = empty_cache("v4-fp8", num_pages=0, page_size=2)
    (cache,) = random_caches((4, 64))
    arguments = good_arguments(caches=(cache,), backend=backend)
    expected = sparse_prefill_paged(**arguments)
    for caches in ((nothing, cache), (cache, nothing)):
        assert_same_bits(sparse_prefill_paged(**(arguments | {"caches": caches})), expected)


def test_no_tokens_give_empty_arrays(backend):
    arguments = good_arguments(
        q=bf16(np.zeros((0, HEADS, 512))), slots=np.zeros((0, 5), np.int32), topk_length=None,
        backend=backend,
    )  # fmt: skip
    result = sparse_prefill_paged(**arguments)
    assert [array.shape for array in result] == [(0, HEADS, 512), (0, HEADS), (0, HEADS)]


def test_inside_jit_a_length_out_of_range_acts_as_the_nearest(backend):
    arguments = good_arguments(backend=backend)
    lengths = np.asarray([TOPK + 5, 100, 1, -3], np.int32)

    @jax.jit
    def call(caches, lengths):
        return sparse_prefill_paged(**(arguments | {"caches": caches, "topk_length": lengths}))

    expected = sparse_prefill_paged(**arguments)
    assert_same_bits(call(arguments["caches"], lengths), expected)


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


def paged(kv_format: str, num_pages: int = 2, page_size: int = 64) -> PagedKV:
    return empty_cache(kv_format, num_pages=num_pages, page_size=page_size)


BAD = [
    # (changed argument, its value, error, what the message says)
    ("validate", 1, ValueError, "validate must be True or False; got 1"),
    ("q", zeros(TOKENS, HEADS, 576), NotImplementedError, "width D of 512; got 576"),
    ("q", zeros(TOKENS, HEADS, 512, dtype=np.float32), ValueError, "be bfloat16; got float32"),
    ("caches", (), ValueError, "caches must be a tuple of 1 or 2 PagedKV; got 0 of them"),
    ("caches", (paged("v4-fp8"),) * 3, ValueError, "1 or 2 PagedKV; got 3 of them"),
    ("caches", paged("v4-fp8"), ValueError, "1 or 2 PagedKV; got a PagedKV"),
    ("caches", (zeros(2, 37440, dtype=np.uint8),), ValueError, "must hold PagedKV; got ndarray"),
    ("caches", (paged("bf16"),), NotImplementedError, "caches must be v4-fp8; got bf16"),
    ("caches", (paged("v3.2-fp8"),), NotImplementedError, "must be v4-fp8; got v3.2-fp8"),
    ("slots", zeros(4, 1, 9, dtype=np.int32), ValueError, r"slots must be \[T, K\]; got shape"),
    ("slots", zeros(4, 9, dtype=np.int64), ValueError, "slots must be int32; got int64"),
    ("slots", zeros(1, 9, dtype=np.int32), ValueError, "slots must have a row for each of the 4"),
    ("slots", zeros(4, 0, dtype=np.int32), ValueError, "slots must have at least one slot a row"),
    ("attn_sink", zeros(2, dtype=np.float32), ValueError, "each of the 3 heads of q; got 2"),
    ("topk_length", zeros(3, dtype=np.int32), ValueError, "each of the 4 tokens of q; got 3"),
    ("topk_length", np.full(4, 129, np.int32), ValueError, "between 0 and K = 128; got 129"),
    ("sm_scale", float("nan"), ValueError, "sm_scale must be finite"),
    ("backend", "cuda", ValueError, "backend must be one of"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), BAD, ids=[f"{row[0]}-{i}" for i, row in enumerate(BAD)]
)
def test_bad_input_is_refused_with_the_argument_what_it_was_and_what_is_accepted(
    name, value, error, message
):
    with pytest.raises(error, match=message):
        sparse_prefill_paged(**good_arguments(**{name: value}))


def test_caches_with_more_slots_than_an_int32_has_are_refused():
    size = 2**20  # tokens to a page; nothing is allocated
    shape = jax.ShapeDtypeStruct((2000, -(-size * 584 // 576) * 576), jnp.uint8)

    def call(cache):
        both = (PagedKV(cache, size, "v4-fp8"), PagedKV(cache, size, "v4-fp8"))
        return sparse_prefill_paged(**good_arguments(caches=both))

    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 slots together.*got 4194304000"):
        jax.eval_shape(call, shape)
