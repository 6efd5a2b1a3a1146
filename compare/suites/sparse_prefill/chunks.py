"""A plan executed: one call for each query range over the same kv, the pieces put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol.inputs import Result


class _Runs(Protocol):
    def run(self, inputs: SparsePrefillInputs) -> Result: ...


Call = Callable[[SparsePrefillInputs], Result]


def run_chunks(implementation: _Runs | Call, inputs: SparsePrefillInputs) -> SparsePrefillResult:
    """Calls `implementation` (its `run`, or a function like it) once for each range of
    inputs.chunks with q, indices and topk_length cut to those rows and kv whole.

    An empty range (start == end) is a call with no tokens, as a plan with an empty chunk makes it.
    ValueError where the ranges leave tokens out, take some twice or change their order, and where
    a piece has another number of tokens than its range.
    """
    call: Call = getattr(implementation, "run", implementation)  # type: ignore[assignment]
    tokens = len(inputs.q)
    chunks = ((0, tokens),) if inputs.chunks is None else inputs.chunks
    _check_cover(chunks, tokens)
    # A plan without chunks belongs to a batch without tokens: one call for its empty tensors.
    pieces = [
        _piece(call, inputs.rows(start, end), f"chunk {number} of {len(chunks)}")
        for number, (start, end) in enumerate(chunks or ((0, 0),))
    ]
    without = sum(piece.max_logits is None for piece in pieces)
    if 0 < without < len(pieces):
        raise ValueError(f"max_logits is None in {without} of {len(pieces)} chunks")
    return SparsePrefillResult(
        out=np.concatenate([piece.out for piece in pieces]),
        lse=np.concatenate([piece.lse for piece in pieces]),
        max_logits=None
        if without
        else np.concatenate([piece.max_logits for piece in pieces if piece.max_logits is not None]),
        notes=tuple(dict.fromkeys(note for piece in pieces for note in piece.notes)),
    )


def _piece(call: Call, rows: SparsePrefillInputs, chunk: str) -> SparsePrefillResult:
    result = call(dataclasses.replace(rows, case=None))
    assert isinstance(result, SparsePrefillResult)
    for name in ("out", "lse", "max_logits"):
        array = getattr(result, name)
        if array is not None and (array.ndim == 0 or len(array) != len(rows.q)):
            raise ValueError(
                f"{chunk} has {len(rows.q)} tokens and its {name} has shape {list(array.shape)}"
            )
    return result


def _check_cover(chunks: tuple[tuple[int, int], ...], tokens: int) -> None:
    done = 0
    for number, (start, end) in enumerate(chunks):
        if start != done or end < start:
            raise ValueError(
                f"chunk {number} is [{start}, {end}) after the tokens [0, {done}); "
                "chunks must take every token once, in order"
            )
        done = end
    if done != tokens:
        raise ValueError(f"the chunks end at token {done} of {tokens}")
