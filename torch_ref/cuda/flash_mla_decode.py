"""FlashMLA's dense decode (`flash_mla_with_kvcache` without indices) under DCP.

The kernel is Hopper's alone, takes pages of 64 bf16 keys, and masks a request's tokens with its own
causal triangle. With one rank a uniform batch goes to it as it stands; a ragged batch, and any
batch of several ranks, goes flattened: one token per request, its key count as cache_seqlens.

Its lse is natural-log, [b, H, s_q], and +inf for a row without a key, but also for one whose sum of
P is NaN: only rows that see no key are read as empty. Nothing here touches CUDA before a function
is called.
"""

from __future__ import annotations

import math

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
from torch_ref.cuda.flash_mla_builds import Build, Kernel, refusal, scale_reason
from torch_ref.decode import DecodeResult
from torch_ref.decode.inputs import VALUE_WIDTH, DecodeInputs

PAGE_SIZE = 64

_KERNEL = Kernel(
    "FlashMLA's dense decode",
    "flash_mla_with_kvcache",
    parameters=("cache_seqlens", "tile_scheduler_metadata", "is_fp8_kvcache", "indices"),
    blackwell=False,
    legacy_part="of which dense decode is one",
)


def find_build() -> Build | None:
    """The first importable build with this function, as in flash_mla_adapter; None if none."""
    return _KERNEL.find_build()


def unsupported_reason(
    *,
    page_size: int | None = None,
    q_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
) -> str | None:
    """None, or in a sentence why FlashMLA can't serve this call here; None arguments aren't judged.

    Any number of heads from 1 to 128, world, rank and interleave will do.
    """
    reason = _unservable(page_size, q_dtype, kv_dtype, sm_scale)
    return reason or refusal(_KERNEL.usable_decode_build)


def dcp_decode(
    inputs: DecodeInputs, *, flatten: bool = False
) -> tuple[DecodeResult, tuple[str, ...]]:
    """FlashMLA's result on CUDA tensors, and in sentences what was flattened, copied or left out.

    inputs are those of check_decode_inputs, whose arguments are torch_ref.dcp_decode's. out is bf16
    [T, H, 512], lse fp32 [T, H], natural-log and -inf for an empty row, both on the device. flatten
    asks for one token per request also where the kernel could be given whole ones.

    ValueError: pages that aren't of 64 keys, float8, sm_scale <= 0. NotImplementedError: no CUDA,
    wrong architecture, no build. What the kernel raises comes through.
    """
    return prepare_decode(inputs, flatten=flatten).run()


def prepare_decode(inputs: DecodeInputs, *, flatten: bool = False) -> PreparedDecode:
    """The same call, laid out but not launched; errors as for dcp_decode."""
    reason = _unservable(inputs.page_size, inputs.q.dtype, inputs.kv_cache.dtype, inputs.sm_scale)
    if reason is not None:
        raise ValueError(reason)
    build = _KERNEL.usable_decode_build()
    if not inputs.query_start_loc[-1]:
        return without_a_launch(inputs)
    return prepare_launch(build, inputs, _batch(inputs, flatten))


def prepare_launch(build: Build, inputs: DecodeInputs, batch: KernelBatch) -> PreparedDecode:
    """One kernel call on `batch`, whose query lengths must all be equal."""
    query_len = batch.uniform_query_len
    if query_len is None:
        raise ValueError(f"batch: query lengths {batch.query_lens}; FlashMLA takes one for all")
    notes = list(batch.notes)
    b, H = len(batch.query_lens), inputs.heads
    q = batch.q.view(b, query_len, H, -1)
    kv_cache = contiguous("kv_cache", inputs.kv_cache, notes)[:, :, None, :]
    lengths = batch.int32(batch.key_lens)
    # Filled by the first launch with how the keys are split; right for these lengths only.
    schedule, _ = build.module.get_mla_metadata()
    options = {"use_legacy": True} if build.takes_use_legacy else {}

    def launch() -> tuple[Tensor, Tensor]:
        return build.function(
            q,
            kv_cache,
            batch.block_table,
            lengths,
            VALUE_WIDTH,
            schedule,
            softmax_scale=inputs.sm_scale,
            causal=batch.causal,
            is_fp8_kvcache=False,
            **options,
        )

    def finish(raw: tuple[Tensor, Tensor]) -> DecodeResult:
        out, lse = raw  # b s H Dv, b H s
        rows = back_to_rows(inputs, out.reshape(-1, H, VALUE_WIDTH), by_token(lse))
        empty = torch.tensor(inputs.key_counts, device=lse.device) == 0
        lse = rows.lse.masked_fill(empty[:, None] & (rows.lse == math.inf), -math.inf)
        return DecodeResult(rows.out, lse.masked_fill(_poisoned(rows), math.nan))

    def finish_notes(raw: tuple[Tensor, Tensor]) -> tuple[str, ...]:
        out, lse = raw
        rows = DecodeResult(out.reshape(-1, H, VALUE_WIDTH), by_token(lse))
        count = int(_poisoned(rows).sum())
        if not count:
            return ()
        return (f"lse +inf read as NaN for {count} rows and heads whose out is NaN",)

    return PreparedDecode(launch, finish, tuple(notes), finish_notes)


def by_token(lse: Tensor) -> Tensor:
    """lse [b, H, s_q] as [b * s_q, H]: the axes change places, a reshape alone would mix heads."""
    return lse.permute(0, 2, 1).reshape(-1, lse.shape[1])


def _poisoned(rows: DecodeResult) -> Tensor:
    """Where a NaN in q or in a key shows: FlashMLA tests its sum so that NaN gives lse +inf too."""
    return rows.out.isnan().any(-1) & (rows.lse == math.inf)


def _batch(inputs: DecodeInputs, flatten: bool) -> KernelBatch:
    if not flatten and why_not_whole(inputs) is None:
        whole = whole_requests(inputs)
        if whole.uniform_query_len is not None:
            return whole
    return single_tokens(inputs)


def _unservable(
    page_size: int | None,
    q_dtype: torch.dtype | None,
    kv_dtype: torch.dtype | None,
    sm_scale: float | None,
) -> str | None:
    """What no build can serve, wherever it runs."""
    if page_size is not None and page_size != PAGE_SIZE:
        return f"page_size = {page_size}: FlashMLA's dense decode takes pages of {PAGE_SIZE} keys"
    for name, dtype in (("q", q_dtype), ("kv_cache", kv_dtype)):
        if dtype is not None and dtype != torch.bfloat16:
            return f"{name} of {dtype}: this adapter runs FlashMLA's dense decode in bf16 only"
    return scale_reason(sm_scale)
