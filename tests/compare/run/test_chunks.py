from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.suites.sparse_prefill.chunks import run_chunks


def inputs_of(tokens: int, chunks: tuple[tuple[int, int], ...] | None) -> SparsePrefillInputs:
    rng = np.random.default_rng(3)
    return SparsePrefillInputs(
        q=rng.standard_normal((tokens, 2, 512)).astype(ml_dtypes.bfloat16),
        kv=rng.standard_normal((20, 512)).astype(ml_dtypes.bfloat16),
        indices=rng.integers(0, 20, (tokens, 8), dtype=np.int32),
        sm_scale=0.04,
        topk_length=rng.integers(0, 9, tokens).astype(np.int32),
        chunks=chunks,
    )


def attend(inputs: SparsePrefillInputs) -> SparsePrefillResult:
    """Softmax attention token by token, so that a token's bits can't depend on its neighbours."""
    tokens, heads, _ = inputs.q.shape
    out = np.zeros((tokens, heads, 512), ml_dtypes.bfloat16)
    lse = np.full((tokens, heads), np.inf, np.float32)
    for t in range(tokens):
        assert inputs.topk_length is not None
        kv = inputs.kv[inputs.indices[t, : inputs.topk_length[t]]].astype(np.float32)
        if len(kv):
            z = inputs.sm_scale * (inputs.q[t].astype(np.float32) @ kv.T)
            p = np.exp(z)
            out[t] = (p @ kv / p.sum(-1, keepdims=True)).astype(ml_dtypes.bfloat16)
            lse[t] = np.log(p.sum(-1))
    return SparsePrefillResult(out=out, lse=lse, max_logits=lse - 1)


@pytest.mark.parametrize("chunks", [((0, 5), (5, 8)), ((0, 0), (0, 5), (5, 5), (5, 8)), ((0, 8),)])
def test_a_plan_gives_the_bits_of_one_call(chunks: tuple[tuple[int, int], ...]) -> None:
    whole = attend(inputs_of(8, None))
    pieces = run_chunks(attend, inputs_of(8, chunks))
    for name in ("out", "lse", "max_logits"):
        assert getattr(pieces, name).tobytes() == getattr(whole, name).tobytes()
        assert getattr(pieces, name).dtype == getattr(whole, name).dtype


def test_every_chunk_is_one_call_with_its_rows_and_the_whole_kv_and_no_case() -> None:
    seen = []

    class Spy:
        def run(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
            assert inputs.chunks is None and inputs.case is None
            seen.append((len(inputs.q), len(inputs.indices), len(inputs.kv)))
            return attend(inputs)

    run_chunks(Spy(), inputs_of(8, ((0, 5), (5, 5), (5, 8))))
    assert seen == [(5, 5, 20), (0, 0, 20), (3, 3, 20)]


def test_a_plan_without_chunks_is_one_call_without_tokens() -> None:
    result = run_chunks(attend, inputs_of(0, ()))
    assert result.out.shape == (0, 2, 512) and result.lse.shape == (0, 2)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (((0, 5),), "end at token 5 of 8"),
        (((0, 5), (6, 8)), r"chunk 1 is \[6, 8\) after the tokens \[0, 5\)"),
        (((0, 5), (4, 8)), r"chunk 1 is \[4, 8\)"),
        (((5, 8), (0, 5)), r"chunk 0 is \[5, 8\)"),
    ],
)
def test_chunks_that_leave_out_or_repeat_tokens_are_refused(
    chunks: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_chunks(attend, inputs_of(8, chunks))


def test_a_piece_of_the_wrong_length_is_refused() -> None:
    def short(inputs: SparsePrefillInputs) -> SparsePrefillResult:
        right = attend(inputs)
        return SparsePrefillResult(out=right.out[:1], lse=right.lse)

    with pytest.raises(ValueError, match="chunk 0 of 2 has 5 tokens and its out has shape"):
        run_chunks(short, inputs_of(8, ((0, 5), (5, 8))))


def test_max_logits_of_some_chunks_only_is_refused() -> None:
    def sometimes(inputs: SparsePrefillInputs) -> SparsePrefillResult:
        right = attend(inputs)
        return SparsePrefillResult(
            out=right.out, lse=right.lse, max_logits=right.lse if len(right.out) == 5 else None
        )

    with pytest.raises(ValueError, match="max_logits is None in 1 of 2 chunks"):
        run_chunks(sometimes, inputs_of(8, ((0, 5), (5, 8))))
