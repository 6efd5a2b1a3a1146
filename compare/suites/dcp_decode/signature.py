"""What a function of DCP decode is called with and gives back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from compare.houses.ranks import run_shards
from compare.judging.attention_call import PARTS
from compare.protocol.case import Case, integer, word
from compare.protocol.signature import INT32, NUMBER, SM_SCALE, FileFormat, Signature, Tensor, Word
from compare.protocol.values import whole_number, whole_or_lengths
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase

_STORED = ("bfloat16", "float8_e4m3fn")
# True and False are what str() makes of a bool.
_FLAG = Word(
    key=word(
        "0", "1", "False", "True",
        convert=lambda text: text in ("1", "True"), show=lambda value: str(int(value)),
    )
)  # fmt: skip


def _unkept(inputs: DcpDecodeInputs) -> str | None:
    if inputs.shards is None:
        return None
    return (
        "shards of a caller's own can't be kept in a bundle; keep one rank's call, or the one over "
        "all keys, which merged results are judged by"
    )


class DcpDecodeSignature(Signature[DcpDecodeInputs, DcpDecodeResult]):
    """One rank's call; all ranks are as many calls, whose results are merged."""

    def needs(self, case: Case) -> tuple[str, ...]:
        assert isinstance(case, DcpDecodeCase)
        return () if case.q_dtype == "bf16" else ("q_scale",)

    def run(
        self, call: Callable[[DcpDecodeInputs], DcpDecodeResult], inputs: DcpDecodeInputs
    ) -> DcpDecodeResult:
        return call(inputs) if inputs.shards is None else run_shards(call, inputs)

    def complete(self, arguments: dict[str, Any]) -> None:
        """The longest query, at least 1, where nothing else is promised."""
        starts = arguments.get("query_start_loc")
        if arguments.get("max_query_len") is not None or starts is None:
            return
        bounds = whole_or_lengths(starts, "query_start_loc")
        if not isinstance(bounds, tuple):
            raise ValueError(f"query_start_loc: {starts!r}; accepted: [B + 1] whole numbers")
        arguments["max_query_len"] = max((1, *(end - start for start, end in pairwise(bounds))))

    def check(self, inputs: DcpDecodeInputs) -> None:
        """Besides: ValueError for numbers that aren't whole, and for a max_query_len that one of
        the requests breaks."""
        super().check(inputs)
        for name in ("max_query_len", "dcp_rank", "dcp_world", "interleave"):
            whole_number(getattr(inputs, name), name)
        starts = inputs.query_start_loc
        if starts.ndim == 1 and np.issubdtype(starts.dtype, np.integer):  # else the oracle says it
            longest = max((1, *(int(end) - int(start) for start, end in pairwise(starts))))
            if inputs.max_query_len < longest:
                raise ValueError(
                    f"max_query_len: {inputs.max_query_len}; accepted: {longest} and more, the "
                    "longest query"
                )
        for shard in inputs.shards or ():
            self.check(shard)


SIGNATURE = DcpDecodeSignature(
    inputs_type=DcpDecodeInputs,
    result_type=DcpDecodeResult,
    telling="block_table",
    tensors={
        "q": Tensor(dtypes=_STORED, axes="T H 576"),
        "kv_cache": Tensor(dtypes=_STORED, axes="pages P 576"),
        "block_table": Tensor(dtypes=INT32, axes="B max_pages"),
        "seq_lens": Tensor(dtypes=INT32, axes="B", host=True),
        "query_start_loc": Tensor(dtypes=INT32, axes="B+1", host=True),
        "total_lens": Tensor(dtypes=INT32, axes="B", host=True),
    },
    numbers=("sm_scale",),
    apart=("shards",),
    withheld=("max_query_len",),
    optional={"q_scale": "float8 queries"},
    results={"out": True, "lse": True, "out_rows": False},
    answered=("out", "lse"),
    empty_lse="-inf",
    file=FileFormat(
        words={
            "sm_scale": SM_SCALE,
            "max_query_len": Word(key=integer(1)),
            "dcp_rank": Word(key=integer(0)),
            "dcp_world": Word(key=integer(1)),
            "interleave": Word(key=integer(1)),
            "causal": _FLAG,
            "kv_scale": NUMBER,
            "q_scale": NUMBER,
        },
        result_words={"parts": Word(key=word(*PARTS))},
        unkept=_unkept,
    ),
)
