"""Inputs of the suite ``sparse-prefill``: the same bytes on every machine, made in blocks of
rows.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from compare.generate.blocks import in_blocks
from compare.generate.streams import Stream, bell, below, raw, rows_of, scaled
from compare.judging.attention_call import SparsePrefillInputs
from compare.suites.sparse_prefill.batch import query_ranges
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.exact import exact_indices, exact_kv, exact_q
from compare.suites.sparse_prefill.slots import random_indices, topk_length

_PADDING = 64  # columns that a strided view skips; keeps every stride a multiple of 16 bytes

# Power of two that multiplies a bell of standard deviation 37837, for q and kv.
_EXPONENTS = {"normal": (-15, -15), "flat": (-21, -15), "peaked": (-12, -15)}


def sparse_prefill_inputs(case: SparsePrefillCase) -> SparsePrefillInputs:
    """The arguments that a case describes. Where poison is set, kv rows that no in-range index
    names are NaN.
    """
    tokens, heads, d = case.tokens, case.h, case.d
    lengths = topk_length(case)
    indices = _empty((tokens, case.topk), np.int32, case.strided, 0)
    classes = np.ones(tokens, np.int64)

    def fill_indices(start: int, end: int) -> None:
        if case.data == "exact":
            indices[start:end], classes[start:end] = exact_indices(case, start, end, lengths)
        else:
            indices[start:end] = random_indices(case, start, end)

    in_blocks(fill_indices, tokens, case.topk)

    q = _empty((tokens, heads, d), ml_dtypes.bfloat16, case.strided, np.nan)

    def fill_q(start: int, end: int) -> None:
        if case.data == "exact":
            q[start:end] = exact_q(case, start, end, classes[start:end])
        else:
            block = _values(case, Stream.Q, start, end, heads * d)
            q[start:end] = block.reshape(end - start, heads, d)

    in_blocks(fill_q, tokens, heads * d)

    kv = _empty((case.s_kv, d), ml_dtypes.bfloat16, case.strided, np.nan)

    def fill_kv(start: int, end: int) -> None:
        if case.data == "exact":
            kv[start:end] = exact_kv(case, start, end)
        else:
            kv[start:end] = _values(case, Stream.KV, start, end, d)

    in_blocks(fill_kv, case.s_kv, d)
    if case.poison:
        named = np.zeros(case.s_kv, bool)
        named[indices[(indices >= 0) & (indices < case.s_kv)]] = True
        kv[~named] = np.nan

    return SparsePrefillInputs(
        q=q,
        kv=kv,
        indices=indices,
        sm_scale=case.scale,
        attn_sink=_sink(case),
        topk_length=lengths,
        chunks=query_ranges(case.q_lens, case.plan) if case.q_lens else None,
        case=case,
    )


def _values(
    case: SparsePrefillCase, stream: Stream, start: int, end: int, width: int
) -> np.ndarray:
    """[rows, width] bfloat16 of q or kv."""
    integers = bell(rows_of(case.seed, stream, start, end, width))
    if case.data == "flashmla":
        # N(0, 1) / 10 + one U(-0.05, 0.05) for the tensor, as FlashMLA's tests draw it: 11 *
        # 37837 / 2^22 = 0.099.
        word = raw(case.seed, Stream.OFFSET, 4 * (stream is Stream.KV), (1,))
        offset = below(word, 2 * 209715 + 1)[0] - 209715
        return scaled(integers * 11 + offset, -22).astype(ml_dtypes.bfloat16)
    exponent = _EXPONENTS[case.data][stream is Stream.KV]
    return scaled(integers, exponent).astype(ml_dtypes.bfloat16)


def _sink(case: SparsePrefillCase) -> np.ndarray | None:
    """[H] float32. mixed: 5 of 16 heads -inf, 5 of 16 +inf, the rest near ln K, where a sink is
    visible.
    """
    if case.sink == "none":
        return None
    if case.sink != "mixed":
        value = 0.0 if case.sink == "zero" else float(case.sink)
        return np.full(case.h, value, np.float32)
    words = raw(case.seed, Stream.SINK, 0, (case.h,))
    kind = words & np.uint64(15)
    finite = scaled(bell(words) + (case.topk.bit_length() * 45426), -16)  # 45426 / 2^16 = ln 2
    infinite = np.where(kind < 5, -np.inf, np.inf).astype(np.float32)
    return np.where(kind < 10, infinite, finite).astype(np.float32)


def _empty(shape: tuple[int, ...], dtype: type, strided: bool, padding: float) -> np.ndarray:
    """An array to fill; strided: a view whose rows are followed by columns of `padding`."""
    if not strided:
        return np.empty(shape, dtype)
    buffer = np.full((*shape[:-1], shape[-1] + _PADDING), padding, dtype)
    return buffer[..., : shape[-1]]
