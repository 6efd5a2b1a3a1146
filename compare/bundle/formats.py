"""What a bundle of each suite holds: tensors of the call, words of it in the metadata, and the
result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.parts import PARTS
from compare.protocol.case import Key, integer, number, word
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.user.answers import dcp_decode_result, sparse_prefill_result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """dtypes: accepted, as NumPy names them. axes: of each axis its size, or its letter, which
    stands for one size throughout a bundle; X+1 is one more than X.
    """

    dtypes: tuple[str, ...]
    axes: str
    needed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """A word of the metadata: how its text is read and written."""

    key: Key
    needed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleFormat:
    """One suite's bundles.

    tensors, words: the arguments of the call, by the names that they have in its inputs.
    results, result_words: the fields of result_type; out and lse are always needed.
    as_result: whatever a caller has for a result -> result_type. unkept: why a caller's own inputs
    can't be kept, None where they can.
    """

    suite: str
    tensors: Mapping[str, Tensor]
    words: Mapping[str, Word]
    results: tuple[str, ...]
    result_words: Mapping[str, Word]
    result_type: type
    as_result: Callable[[Any, str], Any]
    unkept: Callable[[Any], str | None]

    @property
    def needed(self) -> tuple[str, ...]:
        """Tensors and words without which there is no call."""
        parts = {**self.tensors, **self.words}
        return tuple(name for name, part in parts.items() if part.needed)


def _prefill_unkept(inputs: SparsePrefillInputs) -> str | None:
    if inputs.d_v != 512:
        return f"d_v is {inputs.d_v}; a bundle holds calls with d_v 512"
    if inputs.chunks is not None:
        return "chunks of a caller's own can't be kept in a bundle; leave them None"
    return None


def _decode_unkept(inputs: DcpDecodeInputs) -> str | None:
    if inputs.shards is None:
        return None
    return (
        "shards of a caller's own can't be kept in a bundle; keep one rank's call, or the one over "
        "all keys, which merged results are judged by"
    )


_BF16 = ("bfloat16",)
_STORED = ("bfloat16", "float8_e4m3fn")
_INT32 = ("int32",)
_NUMBER = Word(key=dataclasses.replace(number(), show=lambda value: repr(float(value))))
_SM_SCALE = dataclasses.replace(_NUMBER, needed=True)
# True and False are what str() makes of a bool.
_FLAG = Word(
    key=word(
        "0", "1", "False", "True",
        convert=lambda text: text in ("1", "True"), show=lambda value: str(int(value)),
    )
)  # fmt: skip

PREFILL = BundleFormat(
    suite="sparse-prefill",
    tensors={
        "q": Tensor(dtypes=_BF16, axes="T H D"),
        "kv": Tensor(dtypes=_BF16, axes="S D"),
        "indices": Tensor(dtypes=_INT32, axes="T K"),
        "attn_sink": Tensor(dtypes=("float32",), axes="H", needed=False),
        "topk_length": Tensor(dtypes=_INT32, axes="T", needed=False),
    },
    words={"sm_scale": _SM_SCALE},
    results=("out", "lse", "max_logits", "out_rows"),
    result_words={},
    result_type=SparsePrefillResult,
    as_result=sparse_prefill_result,
    unkept=_prefill_unkept,
)

DECODE = BundleFormat(
    suite="dcp-decode",
    tensors={
        "q": Tensor(dtypes=_STORED, axes="T H 576"),
        "kv_cache": Tensor(dtypes=_STORED, axes="pages P 576"),
        "block_table": Tensor(dtypes=_INT32, axes="B max_pages"),
        "seq_lens": Tensor(dtypes=_INT32, axes="B"),
        "query_start_loc": Tensor(dtypes=_INT32, axes="B+1"),
        "total_lens": Tensor(dtypes=_INT32, axes="B"),
    },
    words={
        "sm_scale": _SM_SCALE,
        "max_query_len": Word(key=integer(1)),
        "dcp_rank": Word(key=integer(0)),
        "dcp_world": Word(key=integer(1)),
        "interleave": Word(key=integer(1)),
        "causal": _FLAG,
        "kv_scale": _NUMBER,
        "q_scale": _NUMBER,
    },
    results=("out", "lse", "out_rows"),
    result_words={"parts": Word(key=word(*PARTS))},
    result_type=DcpDecodeResult,
    as_result=dcp_decode_result,
    unkept=_decode_unkept,
)

FORMATS = {form.suite: form for form in (PREFILL, DECODE)}
