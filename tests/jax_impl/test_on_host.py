"""What NumPy does on a CPU outside jit has the bits of the programs that run everywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import sparse_prefill, sparse_prefill_paged
from jax_impl.arrays import compiled_or_numpy, namespace
from jax_impl.kv_cache import FORMATS, gather_kv
from jax_impl.planning import PrefillChunk
from jax_impl.prefill import indices as lists
from tests.jax_impl.decode.batches import Batch as DecodeBatch
from tests.jax_impl.kv_cache.model import poison, random_cache
from tests.jax_impl.prefill.index_lists import i32
from tests.jax_impl.prefill.problems import random_problem
from tests.jax_impl.prefill.sparse.pages import random_caches
from tests.jax_impl.prefill.v4.batches import problem

OFFSETS, SEQ_LENS = i32([5, 7, 7, 12, 13]), i32([300, 9, 40, 129])
TOKENS = 8
TABLE = np.random.default_rng(1).permutation(64).astype(np.int32).reshape(4, 16)
SLOTS = i32([3, 4, 5, -1, 9, 10, 11, 12])
PAGED = (OFFSETS, SEQ_LENS, TABLE, SLOTS)
PAGES = {"page_size": 32, "num_slots": 64 * 32}
SPANS = lists.image_spans_csr([[(298, 299)], [], [(35, 36), (38, 39)], []])


def chosen(topk: int) -> np.ndarray:
    """Entries that the tokens see at ratio 4: 40 at the least."""
    return np.random.default_rng(2).permuted(
        np.tile(np.arange(min(topk, 9), dtype=np.int32), (TOKENS, 1)), axis=1
    )


def images() -> Any:
    return lists.image_visibility(OFFSETS, SEQ_LENS, *SPANS, max_image_tokens=4)


def combined(how: Callable[..., Any], *others: Any, **named: Any) -> Any:
    left, right = images()
    return how(
        chosen(9), OFFSETS, SEQ_LENS, *others, compress_ratio=4, window=16, image_left=left,
        image_right=right, max_image_tokens=4, **named,
    )  # fmt: skip


GATHERED = i32([2 + 15, 0, 5 + 15, 1 + 15])
V4 = {
    "bf16": lambda: problem([50, 3, 300, 20], [0, 3, 5, 0], chunk_size=8),
    "v4-fp8": lambda: problem([50, 3, 300, 20], [0, 3, 5, 0], kv_format="v4-fp8", heads=65),
    "all entries": lambda: problem([300, 20], [3, 4], topk=0, kv_format="v4-fp8", sink=False),
    "window only": lambda: problem([300, 20], [3, 4], ratio=0, kv_format="v4-fp8", window=128),
    "images": lambda: problem(
        [30, 20], [12, 9], kv_format="v4-fp8", spans=(((18, 22), (25, 29)), ((11, 14),)),
        max_image=8,
    ),
    "negative scale": lambda: problem([50, 30], [2, 3], kv_format="v4-fp8", sm_scale=-0.1),
}  # fmt: skip
PLAN = [PrefillChunk(0, 1, 12, 12 + 9, 0, 2), PrefillChunk(1, 2, 7, 7 + 10, 2, 5)]


def v4(name: str, **named: Any) -> Any:
    return V4[name]().run(**named)


def gathered(kv_format: str, offset: int = 3) -> jax.Array:
    paged = random_cache(kv_format, 12, 32)
    return gather_kv(
        paged, TABLE[:2, :6] % 12, i32([150, 70]), poison(2, 140, paged.d),
        gather_lens=i32([130, 0]), offset=offset,
    )  # fmt: skip


def sparse(**named: Any) -> Any:
    q, kv, indices, scale = random_problem(3, heads=70)
    return sparse_prefill(
        q, kv, indices, scale, attn_sink=np.linspace(-2, 2, 70, dtype=np.float32), **named
    )


def paged(**named: Any) -> Any:
    q, _, slots, scale = random_problem(4, rows=14 * 16)
    return sparse_prefill_paged(q, random_caches((8, 16), (3, 32)), slots, scale, **named)


def decode(**named: Any) -> Any:
    batch = DecodeBatch(total_lens=[1100, 3, 40], query_lens=[2, 0, 3], **named)
    return batch.run("xla")


CALLS: dict[str, Callable[[], Any]] = {
    "token_to_request": lambda: lists.token_to_request(OFFSETS, 12, num_mapped=10),
    "gather_lens": lambda: lists.gather_lens(OFFSETS, SEQ_LENS, window=16),
    "image_visibility": images,
    "rows": lambda: combined(
        lists.combine_topk_swa_indices, GATHERED, workspace_rows=100, compressed_rows=75
    ),
    "slots": lambda: combined(
        lists.combine_topk_swa_slots, TABLE, TABLE[:, ::-1], swa_page_size=32,
        swa_num_slots=2048, compressed_page_size=8, compressed_num_slots=512,
    ),
    "global_topk_slots": lambda: lists.global_topk_slots(
        chosen(9), i32([0, 0, 2, 2, 2, 2, 2, 3]), TABLE, page_size=8, num_slots=512
    ),
    "c128_topk_indices": lambda: lists.c128_topk_indices(
        OFFSETS, SEQ_LENS, max_seq_len=300, max_model_len=4096
    ),
    "c128_global_slots": lambda: lists.c128_global_slots(*PAGED, width=128, **PAGES),
    "paged_swa_indices": lambda: lists.paged_swa_indices(
        *PAGED, width=64, window=16, replay_start=i32([290, 0, 0, 3]), **PAGES
    ),
    "dspark_indices": lambda: lists.dspark_indices(*PAGED, num_speculative_tokens=5, **PAGES),
    **{f"gather {name}": lambda name=name: gathered(name) for name in FORMATS},
    "gather from row 0": lambda: gathered("v4-fp8", offset=0),
    "sparse": sparse,
    "sparse, lengths": lambda: sparse(topk_length=i32([0, 7, 128, 64])),
    "paged": paged,
    "paged, lengths": lambda: paged(topk_length=i32([0, 7, 128, 64])),
    "decode": decode,
    "decode, not causal": lambda: decode(causal=False, heads=70),
    "decode e4m3": lambda: decode(dtype=jnp.float8_e4m3fn),
    **{f"v4 {name}": lambda name=name: v4(name, keep_stages=True) for name in V4},
    **{f"v4 fused {name}": lambda name=name: v4(name, fused=True) for name in list(V4)[1:]},
    "v4, two chunks": lambda: v4("negative scale", plan=PLAN, keep_stages=True),
    "v4 fused, two chunks": lambda: v4("negative scale", plan=PLAN, fused=True),
}  # fmt: skip


def arrays(result: Any) -> list[Any]:
    """All that is defined: of a workspace the rows that are listed."""
    found = [x for x in jax.tree.leaves(result) if x.ndim < 3 or x.shape[-1] != 512]
    found.append(getattr(result, "out", None))
    for stage in getattr(result, "stages", None) or ():
        listed = np.unique(np.asarray(stage.indices))
        found.append(np.asarray(stage.workspace).reshape(-1, 512)[listed[listed >= 0]])
    return [x for x in found if x is not None]


def bits(array: Any) -> np.ndarray:
    """Two NaN are the same, as in all of this project's promises."""
    values = np.asarray(array)
    if values.dtype.kind in "ib":
        return values
    values = np.where(np.isnan(values.astype(np.float32)), values.dtype.type(np.nan), values)
    return values.view(f"u{values.dtype.itemsize}")


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_compiled(request, name):
    here = CALLS[name]()
    request.getfixturevalue("compiled")
    there = CALLS[name]()
    assert jax.tree.structure(here) == jax.tree.structure(there)
    left, right = jax.tree.leaves(here), jax.tree.leaves(there)
    assert [(type(x), x.shape, x.dtype) for x in left] == [
        (type(x), x.shape, x.dtype) for x in right
    ]
    for one, other in zip(arrays(here), arrays(there), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_nothing_is_compiled_for_lists():
    with jax.log_compiles(False), counted_programs() as programs:
        for name in ("rows", "slots", "paged_swa_indices", "c128_global_slots", "gather bf16"):
            CALLS[name]()
    assert programs == []


@contextlib.contextmanager
def counted_programs() -> Iterator[list[str]]:
    """The events of compilations, as they come."""
    found: list[str] = []

    def listen(event: str, _: float, **named: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(named.get("fun_name")))

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@compiled_or_numpy("width")
def columns(x: Any, *, width: int) -> tuple[Any, Any]:
    xp = namespace(x)
    return xp.arange(width, dtype=xp.int32), x + 1


def test_numpy_gives_numpy_and_anything_of_jax_gives_jax():
    x = i32([1, 2])
    for given, kind in ((x, np.ndarray), (jnp.asarray(x), jax.Array)):
        for got, want in zip(columns(given, width=3), ([0, 1, 2], [2, 3]), strict=True):
            assert isinstance(got, kind)
            assert got.dtype == np.int32
            assert got.tolist() == want
    assert isinstance(jax.jit(lambda x: columns(x, width=3)[1])(x), jax.Array)


@pytest.mark.parametrize("bound", [False, True])
def test_results_are_bound_to_a_device_where_an_argument_is(bound):
    x = jax.device_put(i32([1, 2]), jax.devices("cpu")[0] if bound else None)
    assert [y.committed for y in columns(x, width=3)] == [bound, bound]
