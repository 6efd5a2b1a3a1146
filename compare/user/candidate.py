"""What the author of a candidate may say about it beside its code: the decorator's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from compare.protocol.case import Case

LSE_BASES = ("natural", "base2")
EMPTY_LSES = ("+inf", "-inf")

_ATTRIBUTE = "__mla_crosscheck__"
_WORDS = {
    "framework": ("torch", "jax", "numpy"),
    "lse": LSE_BASES,
    "empty_lse": (None, *EMPTY_LSES),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CandidateOptions:
    """The decorator's arguments, with their defaults; `candidate` says what they mean."""

    framework: str = "torch"
    device: str | None = None
    lse: str = "natural"
    empty_lse: str | None = None
    supports: Callable[[Case], str | None] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for option, accepted in _WORDS.items():
            if getattr(self, option) not in accepted:
                raise ValueError(
                    f"candidate: {option}={getattr(self, option)!r} isn't accepted; "
                    f"accepted: {', '.join(map(repr, accepted))}"
                )


@overload
def candidate[F: Callable[..., Any]](function: F, /) -> F: ...
@overload
def candidate[F: Callable[..., Any]](
    *,
    framework: str = "torch",
    device: str | None = None,
    lse: str = "natural",
    empty_lse: str | None = None,
    supports: Callable[[Case], str | None] | None = None,
    name: str | None = None,
) -> Callable[[F], F]: ...
def candidate(function: Any = None, /, **options: Any) -> Any:
    """Marks a function as a candidate and says how it wants to be called.

    The function stays as it is; it gets its suite's arguments by keyword:
    sparse-prefill: q [T, H, D] bfloat16, kv [S, D] bfloat16, indices [T, K] int32, sm_scale float,
    d_v int, attn_sink [H] float32 or None, topk_length [T] int32 or None, and gives back
    (out [T, H, 512] bfloat16, max_logits [T, H] float32 or None, lse [T, H] float32) as a tuple, a
    mapping, or an object with these attributes.
    dcp-decode: q [T, H, 576] bfloat16, kv_cache [pages, P, 576] bfloat16 or float8_e4m3fn,
    block_table [B, max_pages], seq_lens [B] (of this rank), query_start_loc [B + 1], total_lens [B]
    (of all ranks), all int32, sm_scale float, dcp_rank, dcp_world and interleave int, causal bool,
    kv_scale float or None, and gives back (out [T, H, 512] bfloat16, lse [T, H] float32) of this
    rank's keys; a case of all ranks calls it once for each and merges. Cases with float8_e4m3fn
    queries are for functions that take q_scale too, a float or None.
    v4-prefill: all of V4PrefillInputs (suites/v4_prefill/call.py) but case and plan_rules: q
    [T, H, 512] bfloat16, swa_cache, swa_block_table, swa_page, compressed_cache,
    compressed_block_table, compressed_page and topk_indices (None, all four, with compress_ratio
    1), kv_format, query_start_loc, seq_lens, seq_lens_bound or None, attn_sink [H] float32 or None,
    sm_scale, compress_ratio, window, image_spans or None, max_image_tokens, max_model_len,
    max_num_batched_tokens and chunk_size. It gives back (out [T, H, 512] bfloat16, max_logits
    [T, H] float32 or None, lse [T, H] float32), or an object with these and, where it runs chunk by
    chunk, plan (chunks as of prefill-plan) and stages (for each chunk workspace, indices and
    lengths): with those a fault has its stage named.
    v4-stages: stage (combine, global_topk, gather, paged_swa, c128, dspark or quantise) and that
    stage's arguments, see V4StagesInputs; it gives back (indices, lengths), (slots, lengths), the
    workspace or the cache.
    decode-plan: query_start_loc and total_lens (tuples of int), max_query_len, causal, num_rows,
    and dcp_rank, dcp_world and interleave if it names them; it gives back (ragged, request, bound,
    padding) and, if it counts them itself, local_counts.
    prefill-plan: seq_lens and query_lens (tuples of int), compress_ratio, window, max_model_len,
    max_num_batched_tokens and chunk_size (int), has_compressed (bool or None; None, the default of
    a case, means compress_ratio > 1), and gives back a sequence of chunks: objects with start, end,
    compressed_rows, workspace_rows, query_start and query_end, or tuples of these.

    Args:
      framework: whose arrays it gets: "torch" (default), "jax" or "numpy" (bfloat16 through
        ml_dtypes).
      device: where they lie, as torch or jax name it ("cpu", "cuda:1", "gpu"); by default a GPU
        where there is one. NumPy arrays have none.
      lse: "natural" (default), or "base2": lse is multiplied by ln 2 before it is judged.
      empty_lse: the lse of a row without a valid key, "+inf" or "-inf"; by default what the suite
        has: +inf in sparse-prefill and v4-prefill (FlashMLA's), -inf in dcp-decode. The other one
        is turned into that before it is judged.
      supports: case -> None, or a sentence why it can't serve the case (UNSUPPORTED). A
        NotImplementedError that the function raises says the same.
      name: what reports call it; by default the words on the command line.

    Raises ValueError for an option outside these words.
    """
    if function is not None:
        return candidate()(function)
    said = CandidateOptions(**options)

    def mark(function: Any) -> Any:
        setattr(function, _ATTRIBUTE, said)
        return function

    return mark


def options_of(function: Callable[..., Any]) -> CandidateOptions:
    """What the decorator said about a function; the defaults where there is none."""
    return getattr(function, _ATTRIBUTE, CandidateOptions())
