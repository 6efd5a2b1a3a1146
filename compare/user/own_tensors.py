"""What tensors of one's own must be before anything is computed with them: types, and a promise
that is kept. Shapes, dtypes and values are the oracle's to look at."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from compare.judging.attention_call import SparsePrefillResult
from compare.protocol.inputs import Inputs, Result
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.v4_prefill.call import V4PrefillResult


def check_arrays(inputs: Inputs, names: Sequence[str]) -> None:
    """TypeError for what isn't a NumPy array where one belongs; None is an argument left out."""
    for name in names:
        value = getattr(inputs, name)
        if value is not None and not isinstance(value, np.ndarray):
            raise TypeError(f"inputs: {name} is a {type(value).__name__}; accepted: a NumPy array")


def check_decode(inputs: DcpDecodeInputs) -> None:
    """ValueError for numbers of a decode call that aren't whole, and for a max_query_len that one
    of its requests breaks."""
    for name in ("max_query_len", "dcp_rank", "dcp_world", "interleave"):
        whole_number(getattr(inputs, name), name)
    starts = inputs.query_start_loc
    if starts.ndim != 1 or not np.issubdtype(starts.dtype, np.integer):
        return  # the oracle says what is accepted
    longest = max((1, *(int(end) - int(start) for start, end in pairwise(starts))))
    if inputs.max_query_len < longest:
        raise ValueError(
            f"max_query_len: {inputs.max_query_len}; accepted: {longest} and more, the longest "
            "query"
        )


def whole_number(value: Any, name: str) -> int:
    """`value` as an int; ValueError where it isn't a whole number."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: {value!r}; accepted: a whole number") from None


def real_number(value: Any, name: str) -> float:
    """`value` as a float; ValueError where it isn't a number. NaN and infinity are the oracle's."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}: {value!r}; accepted: a finite number") from None


def check_result(result: Result, kind: type[Result], name: str) -> Result:
    """A result of a type of compare's own, as it is; TypeError where it is another suite's, or
    holds what isn't a NumPy array.
    """
    if not isinstance(result, kind):
        raise TypeError(f"{name} is a {type(result).__name__}; accepted: a {kind.__name__}")
    if isinstance(result, (SparsePrefillResult, DcpDecodeResult, V4PrefillResult)):
        for field in ("out", "lse", "max_logits", "out_rows"):
            value = getattr(result, field, None)
            needed = field in ("out", "lse")
            if not isinstance(value, np.ndarray) and (needed or value is not None):
                raise TypeError(
                    f"{name}: {field} is a {type(value).__name__}; accepted: a NumPy array"
                )
    return result
