"""The whole prefill path of a V4 layer, from paged caches to attention output.

    plan the chunks, on the host
    for each chunk: gather its compressed entries, then its window, into one workspace
                    list the workspace rows of each token
                    attend

(vLLM 0.33.0, models/deepseek_v4/nvidia/flashmla.py.) Each (token, head) row is computed by
itself, so the plan decides about memory and launches and about no bit of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import backends
from jax_impl.arrays import is_traced, on_host, to_jax_beside, true_or_false
from jax_impl.kv_cache import PagedKV
from jax_impl.prefill.sparse.arguments import D_V
from jax_impl.prefill.sparse.result import SparsePrefillResult, result_of_no_tokens
from jax_impl.prefill.v4.arguments import Arguments, check, check_fused
from jax_impl.prefill.v4.chunk import COMPILED, ON_HOST, TRACED
from jax_impl.prefill.v4.plan import check_area, check_plan
from jax_impl.prefill.v4.result import ChunkStage, V4PrefillResult

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float32, Int32

    from jax_impl.planning import PrefillChunk


def v4_prefill(
    q: BFloat16[Any, "T H 512"],
    swa: PagedKV,
    swa_block_table: Int32[Any, "n columns"],
    query_start_loc: Int32[Any, " n+1"],
    seq_lens: Int32[Any, " n"],
    sm_scale: float,
    *,
    compress_ratio: int,
    compressed: PagedKV | None = None,
    compressed_block_table: Int32[Any, "n columns"] | None = None,
    topk_indices: Int32[Any, "T topk"] | None = None,
    window: int = 128,
    attn_sink: Float32[Any, " H"] | None = None,
    image_spans: Sequence[Sequence[tuple[int, int]]] | None = None,
    max_image_tokens: int = 0,
    seq_lens_bound: Int32[Any, " n"] | None = None,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    plan: Sequence[PrefillChunk] | None = None,
    fused: bool = False,
    backend: str = "auto",
    keep_stages: bool = False,
    validate: bool = True,
) -> V4PrefillResult:
    """Attention of a batch's prefill tokens over their compressed entries and sliding window.

    A token at position pos of its request attends to the first min((pos + 1) // compress_ratio,
    topk) entries of its row of topk_indices and to positions max(pos - window + 1, 0) to pos; in
    an image, to all of the image too.

    Args:
      q: [T, H, 512] bfloat16 queries of all requests, H from 1 to 128.
      swa: the sliding-window cache, "v4-fp8" or "bf16". swa_block_table: [n, columns] int32, its
        pages: position p of request i lies in page swa_block_table[i, p // P]. Columns without a
        position that is gathered may hold anything, and so may the row of a request without tokens.
      query_start_loc: [n + 1] int32, known when the call is made. The first entry may be above 0
        (a batch whose first requests decode); rows of q are counted from it. Requests without
        query tokens may stand anywhere.
      seq_lens: [n] int32, tokens of context of each request, this step's included.
      sm_scale: multiplies the dot product, any finite number.
      compress_ratio: positions of a compressed entry. Any number with a compressed cache (layers
        of V4 have 4 and 128, of V4.1 also 1 and 2), 0 or 1 without.
      compressed, compressed_block_table: the compressed cache and its own pages, by entry; None on
        a layer that has none.
      topk_indices: [T, topk] int32, the entries that each token chose. None with a compressed
        cache: all that it sees (as layers of ratio 128 do, `jax_impl.prefill.indices.
        c128_topk_indices`); the width of the lists then grows with the longest context of the
        batch, by powers of two from 128 on, and on "xla" a sum may be rounded otherwise with it.
      window: positions that a token sees, its own included.
      attn_sink: [H] float32, natural units, as in `sparse_prefill`.
      image_spans: the images of each request, (first, last) positions, both inclusive: wholly
        among this step's tokens and at most max_image_tokens long. Of several that hold a token the
        last one counts. None: no images.
      seq_lens_bound: [n] int32, what the host knows of seq_lens when it plans, none smaller; None:
        seq_lens themselves.
      max_model_len, max_num_batched_tokens, chunk_size: of the engine; they size the workspace
        (`jax_impl.planning.max_workspace_area`).
      plan: chunks to run instead of the planner's own: any plan that keeps P1, P2 and P6.
      fused: attends to the pages where they are (`jax_impl.sparse_prefill_paged`): no gather, no
        workspace, the same keys in the same order, and so the same bits wherever block tables name
        pages of their caches. Both caches have to be "v4-fp8". All requests go through one launch,
        unless a plan is given, which is followed.
      backend: "auto", "xla", "pallas" or "pallas-interpret", of all stages.
      keep_stages: keeps each chunk's workspace and lists, at the cost of their memory.
      validate: looks at values outside jit, which waits for them.

    Returns:
      V4PrefillResult(out [T, H, 512] bfloat16, max_logits, lse [T, H] float32, plan, stages).
      lse is natural-log. T = 0, or an empty plan: empty arrays, without a launch. NaN in q or in a
      key that a token attends to makes that (token, head) row NaN; nothing else that the caches or
      a workspace hold is looked at.

    Memory, beside arguments and results: one chunk's workspace and lists at a time (`ChunkStage`'s,
    at most the planned area of rows of 1 KiB); fused, the lists alone. Heads in no multiple of 64,
    a negative sm_scale and "xla" add a copy of one chunk's share of q and of the results, and "xla"
    gathers the keys of some tokens at once, at most 128 MiB of bfloat16 and its copies.

    Inside jit: query_start_loc and image_spans have to be known, and seq_lens_bound given. Lengths
    and entries that can't be looked at then lead to no other request's rows: what is not a key of
    the token's own request is left out. A block table has to name pages of its cache wherever a
    request's tokens are: what it names is read, and where it names no page of the cache the two
    forms differ: fused leaves the key out, while the gather reads the nearest page. XLA may run
    chunks side by side, with the memory of all of them. Each shape of a chunk is compiled once: its
    requests, N, M, tokens, images and table columns and the batch's tokens; so is each sm_scale.

    Raises:
      ValueError: an argument of the wrong type, dtype or shape, or arguments that don't fit
        together; a plan that is not legal; a request that alone takes more workspace than is
        planned; outside jit also entries that a token doesn't see, holes in front of an entry,
        images that aren't this step's or are too long, pages outside of a block table or cache,
        lengths over their bound.
      NotImplementedError: more than 128 heads, another width, fused with another format, or a
        backend that this machine can't run.
    """
    for value, name in ((fused, "fused"), (keep_stages, "keep_stages"), (validate, "validate")):
        true_or_false(value, name)
    if fused and keep_stages:
        raise ValueError("keep_stages must be False with fused, which has no stages; got True")
    backend = backends.resolve(backend)
    arguments = check(
        q, swa, swa_block_table, query_start_loc, seq_lens, sm_scale,
        compress_ratio=compress_ratio, compressed=compressed,
        compressed_block_table=compressed_block_table, topk_indices=topk_indices, window=window,
        attn_sink=attn_sink, image_spans=image_spans, max_image_tokens=max_image_tokens,
        seq_lens_bound=seq_lens_bound, max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens, chunk_size=chunk_size, backend=backend,
        validate=validate,
    )  # fmt: skip
    if fused:
        check_fused(swa, compressed)
    chunks = None
    if plan is not None:
        chunks = check_plan(plan, arguments.request)
    elif not fused:
        chunks = arguments.request.plan()
    if chunks is not None and not fused:
        check_area(chunks, arguments.request)
    if backend == "pallas-interpret":
        arguments = _on_the_cpu(arguments)
    result = _run(arguments, chunks, fused=fused, keep_stages=keep_stages)
    if arguments.shared and not is_traced(result.out):
        jax.block_until_ready(result.out)
    return result


def _run(
    arguments: Arguments,
    plan: tuple[PrefillChunk, ...] | None,
    *,
    fused: bool,
    keep_stages: bool,
) -> V4PrefillResult:
    batch, settings = arguments.arrays, arguments.settings
    num_tokens, num_heads, _ = batch.q.shape
    stages: list[ChunkStage] = []
    way = COMPILED
    if num_tokens == 0:
        whole = result_of_no_tokens(num_heads, D_V)
    elif is_traced(*jax.tree.leaves(batch)):
        way, whole = TRACED, _unwritten(batch.q)
    elif settings.backend == "xla" and on_host(*jax.tree.leaves(batch)):
        batch, whole = jax.tree.map(np.asarray, batch), _unwritten_on_host(batch.q)
        way = ON_HOST
    else:
        whole = _unwritten(batch.q)
    if plan is None and num_tokens:
        whole = way.on_pages(batch, whole, num_tokens=num_tokens, settings=settings)
    for chunk in plan or ():
        share: dict[str, Any] = {
            "num_tokens": chunk.query_end - chunk.query_start,
            "settings": settings,
        }
        if fused:
            whole = way.on_pages(batch.of(chunk), whole, **share)
            continue
        whole, stage = way.on_chunk(
            batch.of(chunk),
            whole,
            compressed_rows=chunk.compressed_rows,
            workspace_rows=chunk.workspace_rows,
            keep_stage=keep_stages,
            **share,
        )
        stages.extend([] if stage is None else [stage])
    if way is ON_HOST:
        whole, stages = jax.tree.map(
            lambda x: to_jax_beside(x, arguments.arrays.q), (whole, stages)
        )
    return V4PrefillResult(*whole, plan=plan, stages=tuple(stages) if keep_stages else None)


def _unwritten(q: jax.Array) -> SparsePrefillResult:
    """Room for a result, of which every row is in one chunk, where the queries are.

    Bound to that device as they are: the first chunk then runs the program of the others.
    """
    device = None if is_traced(q) else next(iter(q.devices()))
    with jax.default_device(device):
        room = _room(q.shape[:2])
    return jax.device_put(room, device) if device is not None and q.committed else room


def _unwritten_on_host(q: jax.Array) -> SparsePrefillResult:
    rows = q.shape[:2]
    return SparsePrefillResult(
        out=np.empty((*rows, D_V), jnp.bfloat16),
        max_logits=np.empty(rows, np.float32),
        lse=np.empty(rows, np.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _room(rows: tuple[int, int]) -> SparsePrefillResult:
    return SparsePrefillResult(
        out=jax.lax.empty((*rows, D_V), jnp.bfloat16),
        max_logits=jax.lax.empty(rows, jnp.float32),
        lse=jax.lax.empty(rows, jnp.float32),
    )


def _on_the_cpu(arguments: Arguments) -> Arguments:
    if is_traced(*jax.tree.leaves(arguments.arrays)):
        return arguments
    cpu = jax.local_devices(backend="cpu")[0]
    spans = arguments.arrays.spans, arguments.arrays.span_offsets
    arrays = jax.device_put(arguments.arrays, cpu)
    return arguments._replace(arrays=arrays._replace(spans=spans[0], span_offsets=spans[1]))
