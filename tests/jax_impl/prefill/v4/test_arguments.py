"""What the V4 path refuses, by the name of the argument."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl import v4_prefill
from jax_impl.kv_cache import PagedKV, empty_cache
from jax_impl.prefill.v4.arguments import check_fused
from tests.jax_impl.prefill.index_lists import i32
from tests.jax_impl.prefill.problems import bf16
from tests.jax_impl.prefill.v4.batches import Problem, problem


@functools.cache
def batch() -> Problem:
    """Two requests of which 2 and 3 tokens are prefilled, behind 19 and 3 others."""
    return problem([21, 6], [2, 3], topk=4)


def changed(name: str, at: Any, value: int) -> dict[str, np.ndarray]:
    array = np.array(batch().arguments[name])
    array[at] = value
    return {name: array}


def page(name: str, row: int, column: int) -> dict[str, np.ndarray]:
    pages = batch().arguments[name.removesuffix("_block_table")].num_pages
    return changed(name, (row, column), pages)


REFUSED = [
    (lambda: {"q": bf16(np.zeros((4, 2, 512))), "topk_indices": i32([[0] * 4] * 4)},
     r"q must have a row for each of the 5 tokens of query_start_loc; got 4"),
    (lambda: {"q": np.zeros((5, 2, 512), np.float32)}, r"q must be bfloat16; got float32"),
    (lambda: {"query_start_loc": i32([5, 7])}, r"seq_lens must be \[n\] = \[1\]"),
    (lambda: {"query_start_loc": i32([5, 3, 10])}, r"query_start_loc must never fall"),
    (lambda: {"query_start_loc": np.asarray([5, 7, 10])}, r"query_start_loc must be int32"),
    (lambda: {"seq_lens": i32([21, 2])}, r"seq_lens.*got 2 for request 1"),
    (lambda: {"seq_lens_bound": i32([21, 5])},
     r"seq_lens_bound must be an upper bound.*got 5 for request 1 of 6"),
    (lambda: {"seq_lens_bound": i32([21])}, r"seq_lens_bound must be \[n\] = \[2\]"),
    (lambda: {"swa": batch().arguments["swa"].cache}, r"swa must be a PagedKV"),
    (lambda: {"swa": empty_cache("bf16-576", num_pages=8, page_size=16)},
     r"swa must hold rows of 512.*got bf16-576, of 576"),
    (lambda: {"swa_block_table": i32([[0, 1]])}, r"swa_block_table must have a row for each of"),
    (lambda: page("swa_block_table", 0, 1), r"swa_block_table.*in column 1 of request 0"),
    (lambda: changed("swa_block_table", (1, 0), -1), r"swa_block_table.*got -1 in column 0"),
    (lambda: {"swa_block_table": batch().arguments["swa_block_table"][:, :1]},
     r"swa_block_table must have a column for page 1 of request 0"),
    (lambda: page("compressed_block_table", 0, 2),
     r"compressed_block_table.*in column 2 of request 0"),
    (lambda: {"compressed": None}, r"compressed_block_table must be None without a compressed"),
    (lambda: {"compressed": None, "compressed_block_table": None},
     r"topk_indices must be None without a compressed"),
    (lambda: {"compressed": None, "compressed_block_table": None, "topk_indices": None},
     r"compressed must be given for a layer of compress_ratio 4"),
    (lambda: {"compressed_block_table": None}, r"compressed_block_table must be given with"),
    (lambda: {"compress_ratio": 0}, r"compress_ratio must be at least 1 with a compressed cache"),
    (lambda: {"compress_ratio": 2.0}, r"compress_ratio must be an integer from 0.*got 2.0"),
    (lambda: changed("topk_indices", (3, 0), -1),
     r"topk_indices.*entries >= 0.*got -1 in column 0 of token 3 \(request 1\)"),
    (lambda: changed("topk_indices", (0, 2), 5), r"topk_indices.*under 5; got 5 in column 2"),
    (lambda: {"topk_indices": i32([[0]])}, r"topk_indices must have a row for each of the 5"),
    (lambda: {"window": 0}, r"window must be an integer from 1.*got 0"),
    (lambda: {"attn_sink": np.zeros(3, np.float32)}, r"attn_sink.*2 heads of q; got 3"),
    (lambda: {"image_spans": ((),)}, r"image_spans must be a list .* 2 requests; got \(\(\),\)"),
    (lambda: {"image_spans": 7}, r"image_spans must be a list .* 2 requests; got 7"),
    (lambda: {"image_spans": (((18, 19),), ()), "max_image_tokens": 2},
     r"positions 18 to 19 of request 0 is not wholly among this step's"),
    (lambda: {"image_spans": ((), ((3, 6),)), "max_image_tokens": 8},
     r"positions 3 to 6 of request 1 is not wholly among"),
    (lambda: {"image_spans": ((), ((3, 5),)), "max_image_tokens": 2},
     r"positions 3 to 5 of request 1 is longer than max_image_tokens, 2"),
    (lambda: {"image_spans": ((), (4, 5)), "max_image_tokens": 2},
     r"image_spans must hold a tuple of \(first, last\) positions .*got \(4, 5\) for request 1"),
    (lambda: {"image_spans": ((), 4)}, r"image_spans must hold a tuple.*got 4 for request 1"),
    (lambda: {"image_spans": ((), ((3, 5),)), "max_image_tokens": 2},
     r"^image_spans: the image at positions 3 to 5"),
    (lambda: {"window": 2**31 - 1},
     r"^topk_indices, window and max_image_tokens must make lists of at most 2147483520 columns"
     r".*got 4 \+ 2147483647 \+ 0"),
    (lambda: {"max_image_tokens": 2**31 - 1},
     r"^topk_indices, window and max_image_tokens.*got 4 \+ 8 \+ 2147483647"),
    (lambda: {"topk_indices": None, "max_image_tokens": 2**31 - 1},
     r"^topk_indices \(None: .*got 128 \+ 8 \+ 2147483647"),
    (lambda: {"max_model_len": 0}, r"max_model_len must be an integer from 1"),
    (lambda: {"max_num_batched_tokens": None}, r"max_num_batched_tokens must be an integer"),
    (lambda: {"chunk_size": 0}, r"chunk_size must be an integer from 1"),
    (lambda: {"sm_scale": np.inf}, r"sm_scale must be finite"),
    (lambda: {"fused": 1}, r"fused must be True or False; got 1"),
    (lambda: {"keep_stages": None}, r"keep_stages must be True or False; got None"),
    (lambda: {"validate": 1}, r"validate must be True or False; got 1"),
    (lambda: {"fused": True, "keep_stages": True}, r"keep_stages must be False with fused"),
    (lambda: {"backend": "cuda"}, r"backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch().run(**arguments())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": bf16(np.zeros((5, 2, 576)))}, r"q must have a width of 512.*got 576"),
        ({"q": bf16(np.zeros((5, 129, 512)))}, r"q must have 1 to 128 heads; got 129"),
        ({"fused": True, "attn_sink": None}, r"^swa must be v4-fp8 with fused; got bf16"),
        (
            {"fused": True, "swa": empty_cache("v4-fp8", num_pages=16, page_size=16)},
            r"^compressed must be v4-fp8 with fused; got bf16",
        ),
    ],
)
def test_what_is_not_implemented_says_so(arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        batch().run(**arguments)


def test_an_image_of_a_request_without_tokens_is_refused_for_that():
    waiting = problem([21, 9, 6], [2, 0, 3], topk=4)
    with pytest.raises(ValueError, match=r"^image_spans: .*of request 1 .*the request has none"):
        waiting.run(image_spans=((), ((8, 8),), ()), max_image_tokens=1)


def test_fused_numbers_both_caches_in_one_int32(monkeypatch):
    monkeypatch.setattr(PagedKV, "num_slots", 2**30)
    caches = [empty_cache("v4-fp8", num_pages=1, page_size=16)] * 2
    with pytest.raises(ValueError, match=r"^swa and compressed .*got 2147483648"):
        check_fused(*caches)
    check_fused(caches[0], None)


@pytest.mark.parametrize("fused", [False, True])
def test_the_widest_window_that_a_list_can_hold_is_not_refused(fused):
    """The limit is on the list, and nothing is as wide as that where nothing is run."""
    nobody = problem([21], [0], topk=4, window=2**31 - 256, kv_format="v4-fp8")
    assert nobody.run(fused=fused).out.shape == (0, 2, 512)


def test_columns_without_gathered_rows_may_hold_anything():
    """The window of 8 before position 19 begins on the second page of 8."""
    far = problem([21, 6], [2, 3], topk=4, page_size=8)
    table = np.array(far.arguments["swa_block_table"])
    expected = far.run()
    table[0, 0] = -9
    result = far.run(swa_block_table=table)
    np.testing.assert_array_equal(result.lse, expected.lse)
    table[0, 1] = -9
    with pytest.raises(ValueError, match=r"swa_block_table.*got -9 in column 1 of request 0"):
        far.run(swa_block_table=table)


def test_a_request_without_tokens_may_have_no_pages():
    waiting = problem([21, 40, 6], [2, 0, 3], topk=4)
    expected = waiting.run()
    tables = {}
    for name in ("swa_block_table", "compressed_block_table"):
        tables[name] = np.array(waiting.arguments[name])
        tables[name][1] = -1
    np.testing.assert_array_equal(waiting.run(**tables).lse, expected.lse)


@pytest.mark.parametrize(
    ("traced", "known", "message"),
    [
        ("query_start_loc", {}, r"query_start_loc must be known when the call is made"),
        ("seq_lens", {}, r"seq_lens_bound must be given where seq_lens is traced"),
        ("seq_lens_bound", {}, r"seq_lens_bound must be known when the call is made"),
        ("sm_scale", {}, r"sm_scale must be a Python or NumPy number, known when"),
    ],
)
def test_what_is_planned_by_has_to_be_known_inside_jit(traced, known, message):
    arguments = batch().arguments | {"backend": "xla"} | known
    value = arguments.pop(traced, batch().batch.seq_lens)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda x: v4_prefill(**arguments, **{traced: x}).out)(value)


def test_values_are_not_looked_at_where_that_is_asked_for():
    """A hole in front of an entry is then left out, and no other request's row is read for it."""
    holed = batch().run("xla", **changed("topk_indices", (3, 0), -1), validate=False)
    expected = batch().run()
    same = np.asarray(holed.lse) == np.asarray(expected.lse)
    np.testing.assert_array_equal(same.all(axis=1), [True, True, True, False, True])
    assert np.isfinite(np.asarray(holed.out, np.float32)).all()


def test_a_page_that_no_cache_has_is_the_nearest_one_when_gathered_and_left_out_when_fused():
    """Where tables aren't looked at; nothing of it reaches another request."""
    far = problem([21, 6], [2, 3], topk=4, page_size=8, kv_format="v4-fp8")

    def lse(page: int, *, fused: bool) -> np.ndarray:
        table = np.array(far.arguments["swa_block_table"])
        table[0, 1] = page
        result = far.run("xla", swa_block_table=table, fused=fused, validate=False)
        return np.asarray(result.lse)

    last = far.arguments["swa"].num_pages - 1
    right = np.asarray(far.run("xla").lse)
    for bad, nearest in ((-9, 0), (last + 1, last)):
        gathered, fused = lse(bad, fused=False), lse(bad, fused=True)
        np.testing.assert_array_equal(gathered, lse(nearest, fused=False))
        np.testing.assert_array_equal(fused, lse(-1, fused=True))
        assert np.isfinite(fused).all() and (fused[:2] < right[:2]).all()
        np.testing.assert_array_equal(gathered[2:], right[2:])
        np.testing.assert_array_equal(fused[2:], right[2:])
