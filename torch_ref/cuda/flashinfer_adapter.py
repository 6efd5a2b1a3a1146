"""FlashInfer's BatchMLAPagedAttentionWrapper (backends fa3 and fa2) under DCP.

The wrapper takes ragged queries as they are and aligns its causal triangle with the end of the
keys, so with one rank a batch goes to it whole; of several ranks it goes flattened, one token per
request with its own key count. Its page lists must hold exactly ceil(keys / P) pages of each
request, so a request's block table is cut to each row's length.

Whole causal requests aren't given to it where it is known to fail: fewer keys than tokens (an
unsigned difference in fa3's mask), and head counts that divide no tile of 64 or 128, some shapes of
which it refuses. Those go flattened too.

lse comes in base 2 or natural-log as planned, -inf for a row without a key. Nothing here touches
CUDA before a function is called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from torch_ref.cuda.decode_batch import (
    KernelBatch,
    PreparedDecode,
    back_to_rows,
    contiguous,
    single_tokens,
    whole_requests,
    why_not_whole,
    without_a_launch,
)
from torch_ref.decode import DecodeResult
from torch_ref.decode.inputs import KEY_WIDTH, VALUE_WIDTH, DecodeInputs
from torch_ref.merge import LseBase, natural_lse

Backend = Literal["fa3", "fa2"]

_MLA = "flashinfer.mla"
_WORKSPACE_BYTES = 128 << 20
_QUERY_TILE = 128


def version() -> str:
    """FlashInfer's version; ImportError if it isn't importable."""
    return str(getattr(importlib.import_module("flashinfer"), "__version__", "unknown"))


def unsupported_reason(
    backend: Backend = "fa3",
    *,
    q_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
) -> str | None:
    """None, or in a sentence why FlashInfer can't serve this call here; None isn't judged.

    Any number of heads from 1 to 128, page size, world, rank and interleave will do.
    """
    _check_backend(backend)
    return _unservable(q_dtype, sm_scale) or _no_kernel(backend, kv_dtype)


def dcp_decode(
    inputs: DecodeInputs,
    *,
    backend: Backend = "fa3",
    flatten: bool = False,
    lse_base: LseBase = "natural",
) -> tuple[DecodeResult, tuple[str, ...]]:
    """FlashInfer's result on CUDA tensors, and in sentences what was flattened, copied or left out.

    inputs are those of check_decode_inputs, whose arguments are torch_ref.dcp_decode's. out is bf16
    [T, H, 512], lse fp32 [T, H], natural-log and -inf for an empty row, both on the device. flatten
    asks for one token per request also where the kernel could be given whole ones. lse_base is what
    the kernel is asked for; base 2 is converted here.

    ValueError: float8 queries, sm_scale <= 0, an unknown backend or base. NotImplementedError: no
    CUDA, wrong architecture, no FlashInfer. What FlashInfer raises comes through.
    """
    return prepare_decode(inputs, backend=backend, flatten=flatten, lse_base=lse_base).run()


def prepare_decode(
    inputs: DecodeInputs,
    *,
    backend: Backend = "fa3",
    flatten: bool = False,
    lse_base: LseBase = "natural",
) -> PreparedDecode:
    """The same call, planned but not launched; errors as for dcp_decode."""
    _check_backend(backend)
    if lse_base not in ("natural", "base2"):
        raise ValueError(f"lse_base: {lse_base!r}; accepted are 'natural' and 'base2'")
    reason = _unservable(inputs.q.dtype, inputs.sm_scale)
    if reason is not None:
        raise ValueError(reason)
    reason = _no_kernel(backend, inputs.kv_cache.dtype)
    if reason is not None:
        raise NotImplementedError(reason)
    if not inputs.query_start_loc[-1]:
        return without_a_launch(inputs)
    return _prepare_launch(inputs, _batch(inputs, flatten), backend, lse_base)


def page_lists(batch: KernelBatch, page_size: int) -> tuple[Tensor, Tensor]:
    """kv_indptr [b + 1] in pages and kv_indices: of each request exactly the pages of its keys.

    Without any page there is one entry that no request owns, since a kernel is to be given a
    pointer to something.
    """
    pages = [-(-count // page_size) for count in batch.key_lens]
    needed = batch.int32(pages)[:, None]
    column = torch.arange(batch.block_table.shape[1], device=needed.device)
    indices = batch.block_table[column < needed]
    if not len(indices):
        indices = batch.int32([0])
    return batch.int32([0, *accumulate(pages)]), indices


def _prepare_launch(
    inputs: DecodeInputs, batch: KernelBatch, backend: Backend, lse_base: LseBase
) -> PreparedDecode:
    mla = importlib.import_module(_MLA)
    notes = [*batch.notes, f"lse asked for in {_IN_WORDS[lse_base]}"]
    kv_cache = contiguous("kv_cache", inputs.kv_cache, notes)
    float8 = kv_cache.dtype == torch.float8_e4m3fn
    kv_indptr, kv_indices = page_lists(batch, inputs.page_size)
    wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(inputs.q.device), backend=backend)
    wrapper.plan(
        metadata=mla.MLAPlanMetadata.csr(
            batch.int32([0, *accumulate(batch.query_lens)]),
            kv_indptr,
            kv_indices,
            batch.int32(batch.key_lens),
        ),
        num_heads=inputs.heads,
        head_dim_ckv=VALUE_WIDTH,
        head_dim_kpe=KEY_WIDTH - VALUE_WIDTH,
        page_size=inputs.page_size,
        causal=batch.causal,
        sm_scale=inputs.sm_scale,
        q_data_type=batch.q.dtype,
        kv_data_type=kv_cache.dtype,
        query_layout="packed",
        kv_cache_layout="packed",
        lse_mode={"natural": "basee", "base2": "base2"}[lse_base],
        scale_mode="kv-per-tensor" if float8 else "default",
    )
    scales: dict[str, Any] = {}
    if float8:
        scales = {"ckv_scale": inputs.key_scale, "kpe_scale": inputs.key_scale}

    def launch() -> tuple[Tensor, Tensor]:
        return wrapper.run(
            query=batch.q,
            kv_cache=kv_cache,
            return_lse=True,
            return_lse_base_on_e=lse_base == "natural",
            **scales,
        )

    def finish(raw: tuple[Tensor, Tensor]) -> DecodeResult:
        out, lse = raw
        return back_to_rows(inputs, out, natural_lse(lse, lse_base))

    return PreparedDecode(launch, finish, tuple(notes))


_IN_WORDS = {"natural": "natural-log", "base2": "base 2 and converted"}


def _batch(inputs: DecodeInputs, flatten: bool) -> KernelBatch:
    if flatten or why_not_whole(inputs) is not None:
        return single_tokens(inputs)
    whole = whole_requests(inputs)
    if not whole.causal:
        return whole
    risky = _QUERY_TILE % inputs.heads != 0 or any(
        keys < queries for keys, queries in zip(whole.key_lens, whole.query_lens, strict=True)
    )
    return single_tokens(inputs) if risky else whole


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _check_backend(backend: str) -> None:
    if backend not in ("fa3", "fa2"):
        raise ValueError(f"backend: {backend!r}; accepted are 'fa3' and 'fa2'")


def _unservable(q_dtype: torch.dtype | None, sm_scale: float | None) -> str | None:
    """What FlashInfer can't serve, wherever it runs."""
    if q_dtype is not None and q_dtype != torch.bfloat16:
        return f"q of {q_dtype}: FlashInfer's fa2 and fa3 take bf16 queries, here as elsewhere"
    if sm_scale is not None and not sm_scale > 0:
        return (
            f"sm_scale = {sm_scale}: the kernels keep the maximum of unscaled scores, which only a "
            "positive scale leaves a maximum; accepted is a positive number"
        )
    return None


def _no_kernel(backend: Backend, kv_dtype: torch.dtype | None) -> str | None:
    """Why no kernel of this backend can be launched here; None if one can."""
    if not torch.cuda.is_available():
        return "FlashInfer needs a CUDA GPU and torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if backend == "fa3" and major != 9:
        return f"FlashInfer's fa3 needs compute capability 9 (Hopper); this GPU has {major}.{minor}"
    if major < 8:
        return f"FlashInfer's fa2 needs compute capability 8 or more; this GPU has {major}.{minor}"
    if kv_dtype == torch.float8_e4m3fn and major != 9:
        return (
            "FlashInfer's MLA reads float8 keys on compute capability 9 (Hopper) only; this GPU "
            f"has {major}.{minor}"
        )
    return not_importable("BatchMLAPagedAttentionWrapper", "MLAPlanMetadata")


def not_importable(*names: str) -> str | None:
    """Why flashinfer.mla can't be imported with these names; None if it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer isn't installed"
    try:
        mla = importlib.import_module(_MLA)
    except Exception as error:  # loading CUDA libraries can fail in any way
        return f"{_MLA} doesn't import ({type(error).__name__}: {error})"
    missing = [name for name in names if not hasattr(mla, name)]
    if missing:
        return f"FlashInfer {version()} is too old: {_MLA} has no {' and no '.join(missing)}"
    return None
