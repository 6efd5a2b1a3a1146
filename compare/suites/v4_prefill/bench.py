"""How the V4 path is timed.

Contenders of a backend: the whole of v4_prefill and its fused form, planned when they are compiled;
the attention alone, BACKEND-attention, on a gathered workspace; both caches gathered into a
workspace, BACKEND-gather, in bytes a second. FlashMLA and torch have the attention alone: neither
gathers nor lists are in the reference's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from compare.houses.jax_backend import compiled_launch
from compare.houses.torch_backend import torch_device
from compare.judging.plan_rules import sizes
from compare.protocol import arrays as convert
from compare.protocol.implementation import Implementation
from compare.protocol.timing import Bench, Launch, Planned, Transfer
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.jax_adapter import as_result
from compare.suites.v4_prefill.plan import right_plan
from compare.suites.v4_prefill.torch_adapter import gathered, v4_arguments

# Requests, tokens of each, context of each, heads, ratio, topk.
_FIVE = (
    (4, 1024, 65536, 64, 4, 512),
    (4, 1024, 65536, 128, 4, 512),
    (1, 4096, 16384, 64, 4, 1024),
    (4, 1024, 65536, 64, 128, 512),
    (4, 1024, 65536, 64, 1, 64),
)
_TOKEN_BYTES = 584
_ROW_BYTES = 1024


def _line(n: int, tokens: int, context: int, h: int, ratio: int, topk: int) -> str:
    listed = "" if ratio == 1 else f",topk={topk}"
    lens = "+".join([str(context)] * n), "+".join([str(tokens)] * n)
    limits = f"max_len={context},max_tokens={n * tokens}"
    return f"v4-prefill:seq={lens[0]},q={lens[1]},ratio={ratio}{listed},h={h},{limits}"


def flop(inputs: V4PrefillInputs) -> float:
    """2 (512 + 512) for each token, head and key that is seen."""
    import torch_ref

    call = torch_ref.flat_v4_call(**v4_arguments(inputs, "cpu"))
    return float(call.topk_length.sum()) * inputs.q.shape[1] * 2 * 1024


def oracle(inputs: V4PrefillInputs, tokens: Any, device: str) -> tuple[Any, Any]:
    """float64 out and lse of some tokens, their keys read off the caches one by one."""
    import torch_ref

    arguments = v4_arguments(inputs, torch_device(device))
    call = torch_ref.flat_v4_call(**arguments)
    result = torch_ref.sparse_prefill_oracle(
        arguments["q"],
        call.kv,
        call.indices,
        inputs.sm_scale,
        topk_length=call.topk_length,
        attn_sink=arguments["attn_sink"],
        rows=tokens,
    )
    return result.out, result.lse


def parts(
    inputs: V4PrefillInputs, backend: str, device: str | None
) -> dict[str, Callable[[], Launch]]:
    """The attention alone."""
    return {f"{backend}-attention": functools.partial(_attention, inputs, backend, device)}


def _attention(inputs: V4PrefillInputs, backend: str, device: str | None) -> Launch:
    from jax_impl import sparse_prefill

    given = gathered(inputs, torch_device(device))
    arrays = tuple(
        convert.to_numpy(array)
        for array in (given.workspace.flatten(0, 1), given.indices, given.lengths)
    )

    def attend(q: Any, kv: Any, indices: Any, lengths: Any) -> Any:
        options = {"topk_length": lengths, "attn_sink": inputs.attn_sink, "validate": False}
        return tuple(sparse_prefill(q, kv, indices, inputs.sm_scale, backend=backend, **options))

    return compiled_launch(attend, (inputs.q, *arrays), device, as_result)


def transfers(inputs: V4PrefillInputs, backend: str, device: str | None) -> dict[str, Transfer]:
    """Both caches gathered into the workspace of the plan's only chunk, which must be torch_ref's
    bit for bit."""
    lens, entries = _gathered_tokens(inputs)
    rows = int(lens.sum() + entries.sum())
    return {
        f"{backend}-gather": Transfer(
            prepare=functools.partial(_gather, inputs, backend, device),
            bytes_read=rows * _TOKEN_BYTES,
            bytes_written=rows * _ROW_BYTES,
        )
    }


def _gathered_tokens(inputs: V4PrefillInputs) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n]: window rows and compressed entries of each request."""
    known = sizes(inputs.batch)
    return np.array(known.gather, np.int32), np.array(known.compressed, np.int32)


def _gather(inputs: V4PrefillInputs, backend: str, device: str | None) -> Launch:
    from jax_impl.kv_cache import PagedKV, gather_kv_into

    wanted = convert.to_numpy(gathered(inputs, torch_device(device)).workspace)
    (chunk,) = right_plan(inputs)
    lens, entries = _gathered_tokens(inputs)

    def gather(arrays: dict[str, Any]) -> Any:
        import jax

        workspace = jax.empty_ref(jax.ShapeDtypeStruct(wanted.shape, "bfloat16"))
        if "compressed" in arrays:
            cache = PagedKV(arrays["compressed"], inputs.compressed_page, inputs.kv_format)
            gather_kv_into(cache, arrays["entries_table"], entries, workspace, backend=backend)
        gather_kv_into(
            PagedKV(arrays["window"], inputs.swa_page, inputs.kv_format),
            arrays["window_table"],
            arrays["seq_lens"],
            workspace,
            gather_lens=lens,
            offset=chunk.compressed_rows,
            backend=backend,
        )
        return workspace[...]

    arrays = {
        "window": inputs.swa_cache,
        "window_table": inputs.swa_block_table,
        "seq_lens": inputs.seq_lens,
    }
    if inputs.compressed_cache is not None:
        arrays["compressed"] = inputs.compressed_cache
        arrays["entries_table"] = inputs.compressed_block_table

    def check(found: Any) -> Any:
        mine, theirs = (np.asarray(array).view(np.uint16) for array in (found, wanted))
        unequal = int((mine != theirs).any(-1).sum())
        if unequal:
            rows = mine.shape[0] * mine.shape[1]
            raise ValueError(f"wrong: {unequal} of {rows} rows have other bits")
        return found

    return compiled_launch(gather, (arrays,), device, check)


def planned(inputs: V4PrefillInputs, implementation: Implementation) -> Planned:
    """What the largest chunk and the results take."""
    plan = right_plan(inputs)
    workspace = max((chunk.end - chunk.start) * chunk.workspace_rows for chunk in plan)
    tokens = max(chunk.query_end - chunk.query_start for chunk in plan)
    listed = 0 if inputs.topk_indices is None else inputs.topk_indices.shape[1]
    columns = -(-(listed + inputs.window + inputs.max_image_tokens) // 128) * 128
    T, H, _ = inputs.q.shape
    return Planned(
        workspace=0 if getattr(implementation, "fused", False) else workspace * _ROW_BYTES,
        lists=tokens * (columns + 1) * 4,
        results=T * H * (512 * 2 + 2 * 4),
    )


BENCH = Bench(
    lines=tuple(_line(*words) for words in _FIVE),
    against=("flash_mla",),
    flop=flop,
    oracle=oracle,
    facts={
        "planning": "chunks are planned on the host when a program is compiled: no plan is in a "
        "time",
        "reference": "flash_mla and torch: attention alone on a gathered workspace",
        "memory": "each program once in a process of its own: the device's peak over what was in "
        "use before",
    },
    parts=parts,
    transfers=transfers,
    planned=planned,
    same_bits=True,
)
