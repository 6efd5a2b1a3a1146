"""The whole V4 path against the definition: every token's keys, from paged caches to output."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_impl import v4_prefill
from jax_impl.planning import PrefillChunk, plan_prefill_chunks
from jax_impl.prefill.v4 import api, chunk
from tests.jax_impl.prefill.index_lists import filled, i32, workspace_rows
from tests.jax_impl.prefill.problems import assert_same_bits
from tests.jax_impl.prefill.reference import assert_agrees
from tests.jax_impl.prefill.v4 import batches
from tests.jax_impl.prefill.v4.batches import Problem, numpy_of, problem


def statistics(result: Any) -> tuple[Any, ...]:
    return result.out, result.max_logits, result.lse


def assert_same(left: Any, right: Any) -> None:
    assert_same_bits(statistics(left), statistics(right))  # type: ignore[arg-type]


@functools.cache
def mixed(kv_format: str = "bf16") -> Problem:
    """Requests without tokens in front, between and behind; a short one, from its beginning; one
    far beyond its window; one whose window straddles pages of 16."""
    return problem([50, 3, 300, 20, 40, 9], [0, 3, 5, 0, 9, 0], kv_format=kv_format, chunk_size=8)


@functools.cache
def mixed_result(kv_format: str = "bf16") -> Any:
    return numpy_of(mixed(kv_format).run(keep_stages=True))


@pytest.mark.parametrize("kv_format", ["bf16", "v4-fp8"])
def test_every_token_attends_to_its_keys(kv_format):
    result = mixed_result(kv_format)
    assert [(c.start, c.end) for c in result.plan] == [(1, 5)]
    assert_agrees(result, mixed(kv_format).expected())


@pytest.mark.parametrize(
    ("ratio", "topk", "window"), [(0, 0, 128), (1, 5, 4), (2, 16, 1), (128, 0, 8), (128, 4, 8)]
)
def test_layers_of_every_kind(ratio, topk, window):
    """Window only; one entry per token; a window of the token itself; all entries of 128."""
    batch = problem([3, 300], [2, 3], ratio=ratio, topk=topk, window=window, heads=3)
    result = batch.run()
    assert_agrees(result, batch.expected())


def test_stages_hold_the_rows_and_the_lists_of_the_plan():
    batch, result = mixed().batch, mixed_result()
    (chunk,), (stage,) = result.plan, result.stages
    n, m = chunk.compressed_rows, chunk.workspace_rows
    gathered = batch.gather_lens
    for row, request in enumerate(range(chunk.start, chunk.end)):
        entries = mixed().entry_rows[request]
        np.testing.assert_array_equal(stage.workspace[row, : len(entries)], entries)
        window = mixed().window_rows[request][-gathered[request] :]
        np.testing.assert_array_equal(stage.workspace[row, n : n + len(window)], window)
    indices, lengths = workspace_rows(batch, m, n)
    # The lists are the whole batch's; request 0 is in no chunk, so rows begin with request 1.
    np.testing.assert_array_equal(stage.indices, np.where(indices < 0, -1, indices - m))
    np.testing.assert_array_equal(stage.lengths, lengths)


def test_stages_are_not_kept_unless_they_are_asked_for():
    result = mixed().run()
    assert result.stages is None
    assert_same(result, mixed_result())


def test_an_image_is_seen_whole():
    """Images at the beginning and in the middle of what two requests prefill; two overlap."""
    batch = problem(
        [30, 40], [12, 20], window=4, spans=(((18, 24), (23, 26)), ((25, 32),)), max_image=8
    )
    result = batch.run(keep_stages=True)
    assert_agrees(result, batch.expected())
    # The second request's first token in its image: 6 entries, its window, 7 positions ahead.
    assert result.stages[0].lengths[12 + 5] == 6 + 4 + 7


def test_a_prompt_in_steps_gives_the_bits_that_it_gives_whole():
    """vllm-project/vllm#57152: 300 tokens at once, and as 100 + 100 + 100; window 128."""
    whole = problem(
        [300], [300], ratio=0, window=128, page_size=64, kv_format="v4-fp8",
        max_num_batched_tokens=300,
    )  # fmt: skip
    parts = []
    for step in range(3):
        tokens = slice(100 * step, 100 * step + 100)
        part = whole.run(
            q=whole.arguments["q"][tokens], query_start_loc=i32([0, 100]),
            seq_lens=i32([100 * step + 100]),
        )  # fmt: skip
        parts.append(numpy_of(statistics(part)))
    stitched = jax.tree.map(lambda *each: np.concatenate(each), *parts)
    assert_same_bits(stitched, numpy_of(statistics(whole.run())))


def test_no_chunk_is_empty():
    """vllm-project/vllm#49059: 5 chunks as shipped, 3 of them without a token."""
    batch = problem(
        [40, 40, 16, 64, 0], [0, 5, 0, 3, 0], max_model_len=64, max_num_batched_tokens=16,
        chunk_size=1,
    )  # fmt: skip
    result = batch.run()
    chunks = [(c.query_start, c.query_end, c.compressed_rows, c.workspace_rows)
              for c in result.plan]  # fmt: skip
    assert chunks == [(0, 5, 10, 22), (5, 8, 16, 26)]
    assert_agrees(result, batch.expected())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("query_lens", [[], [0], [0, 0, 0]])
def test_nothing_is_launched_for_no_tokens(monkeypatch, query_lens, fused):
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    for way in ("COMPILED", "ON_HOST"):
        monkeypatch.setattr(api, way, chunk.Way(launched, launched))
    batch = problem([9] * len(query_lens), query_lens, kv_format="v4-fp8", heads=5)
    result = batch.run(fused=fused, keep_stages=not fused)
    assert result.out.shape == (0, 5, 512)
    assert result.max_logits.shape == result.lse.shape == (0, 5)
    assert result.plan == (None if fused else ())
    assert result.stages == (None if fused else ())


def test_the_host_may_know_upper_bounds_only():
    """N and M are then larger than any request needs: rows that nothing is gathered into."""
    bounds = mixed().batch.seq_lens + i32([0, 2, 9, 40, 16, 3])
    result = mixed().run(seq_lens_bound=bounds, keep_stages=True)
    (chunk,) = result.plan
    assert chunk.compressed_rows == 309 // 4
    assert chunk.workspace_rows == 309 // 4 + 9 + 7
    assert_same(result, mixed_result())


@pytest.mark.parametrize("kv_format", ["bf16", "v4-fp8"])
def test_what_a_workspace_held_before_never_comes_through(monkeypatch, request, kv_format):
    """Every row that nothing was gathered into is NaN, and there are such rows."""

    def full_of_nan(rows: jax.ShapeDtypeStruct) -> np.ndarray:
        return np.full(rows.shape, np.nan, rows.dtype)

    expected = mixed_result(kv_format)
    program: Any = chunk.attend_chunk
    monkeypatch.setattr(chunk, "_empty_on_host", full_of_nan)
    monkeypatch.setattr(chunk, "_empty_workspace", lambda rows: jax.new_ref(full_of_nan(rows)))
    program.clear_cache()
    try:
        here = numpy_of(mixed(kv_format).run(keep_stages=True))
        request.getfixturevalue("compiled")
        there = numpy_of(mixed(kv_format).run(keep_stages=True))
    finally:
        program.clear_cache()
    for result in (here, there):
        stale = np.isnan(result.stages[0].workspace.astype(np.float32)).all(axis=2)
        assert stale.any(axis=1).all()  # N is one request's, M - N another's
        assert_same(result, expected)


def test_inside_jit_lengths_may_be_traced():
    arguments = dict(mixed().arguments)
    known = {name: arguments.pop(name) for name in ("query_start_loc", "sm_scale")}
    static = ("compress_ratio", "window", *batches.ENGINE)
    known |= {name: arguments.pop(name) for name in static}
    bounds = mixed().batch.seq_lens + 4

    @jax.jit
    def run(arrays: dict[str, Any]) -> Any:
        return v4_prefill(**arrays, **known, seq_lens_bound=bounds, backend="xla")

    result = run(arguments)
    assert result.plan == mixed().run(seq_lens_bound=bounds).plan
    assert_same(result, mixed_result())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("fused", [False, True])
def test_chunks_of_one_shape_share_a_program(fused):
    """Also where q is bound to a device: every chunk writes into the same kind of result."""
    batch = problem([20] * 5, [4] * 5, kv_format="v4-fp8", heads=3, chunk_size=8)
    program: Any = chunk.attend_pages if fused else chunk.attend_chunk
    plan = [PrefillChunk(i, i + 1, 5, 5 + 11, 4 * i, 4 * i + 4) for i in range(5)]
    for q in (batch.arguments["q"], jax.device_put(batch.arguments["q"], jax.devices()[0])):
        before = program._cache_size()
        batch.run(q=q, plan=plan, fused=fused)
        assert program._cache_size() == before + 1


@pytest.mark.filterwarnings("error")
def test_vmap_over_queries():
    batch = problem([20, 30], [2, 3], kv_format="v4-fp8", heads=3)
    plan = [PrefillChunk(0, 1, 5, 14, 0, 2), PrefillChunk(1, 2, 7, 17, 2, 5)]
    q = batch.arguments["q"]

    def run(q: jax.Array) -> jax.Array:
        return batch.run(q=q, fused=True, plan=plan).out

    both = jax.vmap(run)(np.stack([q, -q]))
    for got, queries in zip(both, (q, -q), strict=True):
        assert (np.asarray(got) == np.asarray(run(queries))).all()


def test_without_jit():
    batch = problem([20, 30], [2, 3], kv_format="v4-fp8", heads=3)
    expected = batch.run(fused=True)
    with jax.disable_jit():
        assert_same(batch.run(fused=True), expected)


def test_a_plan_comes_back_as_it_was_planned():
    batch = mixed().batch
    planned = plan_prefill_chunks(
        batch.seq_lens, batch.query_lens, compress_ratio=4, window=8, max_model_len=320,
        max_num_batched_tokens=32, chunk_size=1,
    )  # fmt: skip
    assert len(planned) == 3
    result = mixed().run(chunk_size=1)
    assert result.plan == planned
    assert_same(result, mixed_result())


def test_torch_tensors_are_taken_without_numpy():
    torch = pytest.importorskip("torch")
    names = ("seq_lens", "query_start_loc", "topk_indices", "attn_sink")
    tensors = {name: torch.from_numpy(mixed().arguments[name]) for name in names}
    q = torch.from_numpy(mixed().arguments["q"].view(np.int16)).view(torch.bfloat16)
    assert_same(mixed().run(**tensors, q=q), mixed_result())


def test_lists_of_all_entries_may_also_be_given():
    """Ratio 128 without topk_indices is `c128_topk_indices` put in by hand."""
    batch = problem([3, 300], [2, 3], ratio=128, topk=0)
    listed = [list(range((position + 1) // 128)) for _, position in batch.batch.tokens]
    given = batch.run(topk_indices=filled(listed, 128)[0])
    assert_same(batch.run(), given)
