"""FlashInfer's native DCP decode on Blackwell: trtllm_batch_decode_with_kv_cache_mla, enable_dcp.

The one CUDA kernel that masks by global position itself: it is given whole requests, ragged ones as
a compact query with cum_seq_lens_q, the local lengths, and one exclusive global bound per request,
that of its newest token. It deals positions out one by one (interleave 1) and takes pages of 2 to
128 keys that divide 128, in block tables as wide as a multiple of 128 / P; nothing is said of
entries past a length, so they are made page 0. Requests whose tokens see what lies after them, too,
go as requests of one token with the same bound.

lse is natural-log, which is asked for by leaving return_lse_base alone, [tokens, H], -inf for an
empty row. The kernel is CuTe DSL's monolithic one, for compute capability 10 and 11. Written from
FlashInfer's documented contract.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_ref.cuda.decode_batch import (
    KernelBatch,
    PreparedDecode,
    back_to_rows,
    contiguous,
    single_tokens,
    whole_requests,
    without_a_launch,
)
from torch_ref.cuda.flashinfer_adapter import not_importable, version
from torch_ref.decode import DecodeResult
from torch_ref.decode.inputs import KEY_WIDTH, VALUE_WIDTH, DecodeInputs

_FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
_PARAMETERS = ("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global", "cum_seq_lens_q")
_QK_NOPE_HEAD_DIM = 128
_TABLE_KEYS = 128
_WORKSPACE_BYTES = 128 << 20


def unsupported_reason(
    *,
    page_size: int | None = None,
    q_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    dcp_world: int | None = None,
    interleave: int | None = None,
    sm_scale: float | None = None,
) -> str | None:
    """None, or in a sentence why the kernel can't serve this call here; None isn't judged."""
    return (
        _unservable(page_size, q_dtype, kv_dtype, dcp_world, interleave, sm_scale) or _no_kernel()
    )


def dcp_decode(inputs: DecodeInputs) -> tuple[DecodeResult, tuple[str, ...]]:
    """The kernel's result on CUDA tensors, and in sentences what was padded, flattened or left out.

    inputs are those of check_decode_inputs, whose arguments are torch_ref.dcp_decode's. out is
    [T, H, 512] in the kernel's output dtype, lse fp32 [T, H], natural-log and -inf for an empty
    row, both on the device.

    ValueError: an interleave above 1 with several ranks, pages that don't divide 128, queries and
    keys of two dtypes, sm_scale <= 0. NotImplementedError: no CUDA, wrong architecture, no
    FlashInfer. What FlashInfer raises comes through.
    """
    return prepare_decode(inputs).run()


def prepare_decode(inputs: DecodeInputs) -> PreparedDecode:
    """The same call, laid out but not launched; errors as for dcp_decode."""
    reason = _unservable(
        inputs.page_size,
        inputs.q.dtype,
        inputs.kv_cache.dtype,
        inputs.dcp_world,
        inputs.interleave,
        inputs.sm_scale,
    )
    if reason is not None:
        raise ValueError(reason)
    reason = _no_kernel()
    if reason is not None:
        raise NotImplementedError(reason)
    if not inputs.query_start_loc[-1]:
        return without_a_launch(inputs)
    return _prepare_launch(inputs)


def _prepare_launch(inputs: DecodeInputs) -> PreparedDecode:
    batch, local_lens, bounds = _with_bounds(inputs)
    notes = list(batch.notes)
    kv_cache = contiguous("kv_cache", inputs.kv_cache, notes)
    block_table = _readable_table(batch, local_lens, inputs.page_size, notes)
    query_len = batch.uniform_query_len
    options = {}
    query = batch.q
    if query_len is not None:
        query = batch.q.view(len(batch.query_lens), query_len, inputs.heads, KEY_WIDTH)
    else:
        starts = batch.int32([0, *accumulate(batch.query_lens)])
        options = {"cum_seq_lens_q": starts, "max_q_len": max(batch.query_lens)}
    layout = "dense" if query_len is not None else "compact"
    notes.append(f"query layout {layout}, lse in natural-log by default")
    options |= {
        "block_tables": block_table,
        "seq_lens": batch.int32(local_lens),
        "max_seq_len": max(1, *local_lens),
        "causal_seqlens_kv_global": batch.int32(bounds),
    }
    function = getattr(importlib.import_module("flashinfer.mla"), _FUNCTION)

    def launch() -> tuple[Tensor, Tensor]:
        return function(
            query=query,
            kv_cache=kv_cache,
            workspace_buffer=_workspace(query.device),
            qk_nope_head_dim=_QK_NOPE_HEAD_DIM,
            kv_lora_rank=VALUE_WIDTH,
            qk_rope_head_dim=KEY_WIDTH - VALUE_WIDTH,
            bmm1_scale=inputs.score_scale,
            bmm2_scale=inputs.value_scale,
            backend="cute-dsl",
            return_lse=True,
            enable_dcp=True,
            cp_world=inputs.dcp_world,
            cp_rank=inputs.dcp_rank,
            **options,
        )

    def finish(raw: tuple[Tensor, Tensor]) -> DecodeResult:
        out, lse = raw
        out, lse = out.reshape(-1, inputs.heads, VALUE_WIDTH), lse.reshape(-1, inputs.heads)
        return back_to_rows(inputs, out, lse)

    return PreparedDecode(launch, finish, tuple(notes))


def _with_bounds(inputs: DecodeInputs) -> tuple[KernelBatch, tuple[int, ...], tuple[int, ...]]:
    """The batch, and of each of its requests the local length and its newest token's bound."""
    if inputs.causal:
        kept = [b for b, count in enumerate(inputs.query_lens) if count]
        batch = whole_requests(inputs)
    else:
        kept = list(inputs.rows.request[: inputs.query_start_loc[-1]])
        batch = single_tokens(inputs)
    return (
        batch,
        tuple(inputs.seq_lens[b] for b in kept),
        tuple(inputs.total_lens[b] for b in kept),
    )


def _readable_table(
    batch: KernelBatch, local_lens: tuple[int, ...], page_size: int, notes: list[str]
) -> Tensor:
    """The block table with page 0 past each length, and wide enough for the kernel's tiles."""
    table, multiple = batch.block_table, _TABLE_KEYS // page_size
    width = table.shape[1]
    pages = batch.int32([-(-count // page_size) for count in local_lens])
    unused = torch.arange(width, device=table.device) >= pages[:, None]
    if bool((unused & (table != 0)).any()):
        notes.append("block-table entries past the lengths replaced by page 0")
    padded = -(-width // multiple) * multiple
    if padded != width:
        notes.append(f"block table padded from {width} to {padded} columns (page 0)")
    return pad(table.masked_fill(unused, 0), (0, padded - width))


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _unservable(
    page_size: int | None,
    q_dtype: torch.dtype | None,
    kv_dtype: torch.dtype | None,
    dcp_world: int | None,
    interleave: int | None,
    sm_scale: float | None,
) -> str | None:
    """What the kernel can't serve, wherever it runs."""
    if interleave not in (None, 1) and dcp_world != 1:
        return f"interleave = {interleave}: FlashInfer's DCP kernel deals keys out one by one only"
    if page_size is not None and (page_size < 2 or _TABLE_KEYS % page_size):
        return f"page_size = {page_size}: accepted are 2, 4, 8, 16, 32, 64 and 128 keys"
    if q_dtype is not None and kv_dtype is not None and q_dtype != kv_dtype:
        return f"q of {q_dtype} with keys of {kv_dtype}: accepted is one dtype for both"
    if sm_scale is not None and not sm_scale > 0:
        return f"sm_scale = {sm_scale}: accepted is a positive number"
    return None


def _no_kernel() -> str | None:
    """Why the kernel can't be launched here; None if it can."""
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA GPU and torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if major not in (10, 11):
        return (
            "FlashInfer's DCP kernel is written in tcgen05 instructions for compute capability 10 "
            f"and 11 (Blackwell data centre); this GPU has {major}.{minor}"
        )
    reason = not_importable(_FUNCTION)
    if reason is not None:
        return reason
    function = getattr(importlib.import_module("flashinfer.mla"), _FUNCTION)
    missing = [name for name in _PARAMETERS if name not in inspect.signature(function).parameters]
    if missing:
        return f"FlashInfer {version()} is too old: {_FUNCTION} takes no {', no '.join(missing)}"
    return None
