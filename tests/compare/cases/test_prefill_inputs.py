"""Inputs are the same bytes everywhere and mean what the case says."""

import ml_dtypes
import numpy as np
import pytest

from compare.generate.streams import Stream, bell, below, raw
from compare.judging.attention_call import SparsePrefillInputs
from compare.suites.sparse_prefill.make import sparse_prefill_inputs
from compare.suites.table import make_inputs, parse_case


def inputs_of(words: str) -> SparsePrefillInputs:
    return make_inputs(parse_case(f"sparse-prefill:{words}"))


def valid_slots(inputs: SparsePrefillInputs) -> np.ndarray:
    valid = (inputs.indices >= 0) & (inputs.indices < len(inputs.kv))
    if inputs.topk_length is not None:
        valid &= np.arange(inputs.indices.shape[1]) < inputs.topk_length[:, None]
    return valid


@pytest.mark.parametrize(
    ("words", "digest"),
    [
        ("s_q=2,sink=mixed,length=ragged,invalid=0.2", "2a30335758899d05"),
        (
            "s_q=3,d=576,topk=100,h=5,data=flashmla,order=dup,empty_rows=1,seed=9",
            "72bfff7469486753",
        ),
        ("s_q=3,topk=64,h=7,data=exact,length=ragged,invalid=0.3", "be487eec9c9c288f"),
        ("s_q=2,data=flat,order=sorted,s_kv=95,sink=0.5", "ac5811bfb9cf03d3"),
        ("s_q=2,data=peaked,sm_scale=0.25,length=17", "15701eeead258d5f"),
    ],
)
def test_the_bytes_of_a_case_never_change(words: str, digest: str) -> None:
    assert inputs_of(words).sha256().startswith(digest)


def test_a_stream_can_be_entered_at_any_row() -> None:
    assert (raw(3, Stream.Q, 0, (64,))[24:] == raw(3, Stream.Q, 24, (40,))).all()
    with pytest.raises(ValueError, match="multiple of 4"):
        raw(3, Stream.Q, 2, (4,))


def test_blocks_don_t_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = parse_case("sparse-prefill:s_q=9,h=3,data=exact,length=ragged,invalid=0.3,empty_rows=2")
    whole = sparse_prefill_inputs(case).sha256()
    monkeypatch.setattr("compare.generate.blocks.BLOCK_WORDS", 2000)
    assert sparse_prefill_inputs(case).sha256() == whole


def test_bell_is_centred_and_below_covers_its_range() -> None:
    words = raw(0, Stream.KV, 0, (1 << 16,))
    values = bell(words)
    assert abs(values.mean()) < 600 and abs(values.std() - 37837) < 300
    assert set(np.unique(below(words, 5))) == {0, 1, 2, 3, 4}


def test_strided_views_hold_the_same_values() -> None:
    plain, strided = inputs_of("s_q=3,h=4"), inputs_of("s_q=3,h=4,strided=1")
    assert plain.sha256() == strided.sha256()
    for name in ("q", "kv", "indices"):
        array = getattr(strided, name)
        assert not array.flags.c_contiguous
        assert all(stride % 16 == 0 for stride in array.strides[:-1])


def test_poison_stands_only_where_no_in_range_index_points() -> None:
    inputs = inputs_of("s_q=2,s_kv=400,topk=128,length=ragged,invalid=0.3")
    nan = np.isnan(inputs.kv.astype(np.float32)).any(axis=1)
    in_range = inputs.indices[(inputs.indices >= 0) & (inputs.indices < 400)]
    assert nan.any() and not nan[in_range].any()
    assert not np.isnan(inputs_of("s_q=2,s_kv=400,poison=0").kv.astype(np.float32)).any()


def test_indices_are_distinct_unless_dup_asks_for_repeats() -> None:
    for row in inputs_of("s_q=3,s_kv=300,topk=256").indices:
        assert len(set(row)) == 256
    for row in inputs_of("s_q=3,s_kv=300,topk=256,order=dup").indices:
        assert len(set(row)) == 128
    rows = inputs_of("s_q=3,s_kv=300,topk=256,order=sorted").indices
    assert (np.diff(rows, axis=1) > 0).all()


def test_a_width_beyond_s_kv_names_every_row_once_and_ends_in_fillers() -> None:
    inputs = inputs_of("s_q=2,s_kv=95,topk=128")
    for row in inputs.indices:
        assert sorted(row[:95]) == list(range(95))
        assert ((row[95:] < 0) | (row[95:] >= 95)).all()


def test_holes_stand_before_valid_slots_and_empty_rows_have_none() -> None:
    inputs = inputs_of("s_q=5,topk=256,s_kv=300,invalid=0.3,empty_rows=2")
    valid = valid_slots(inputs)
    assert (valid.sum(axis=1) == 0).sum() == 2
    row = valid[valid.any(axis=1)][0]
    assert not row[: np.flatnonzero(row)[-1]].all()


def test_flat_scores_spread_less_than_a_fifth() -> None:
    inputs = inputs_of("s_q=2,s_kv=2048,topk=2048,data=flat,poison=0")
    scores = inputs.q.astype(np.float64) @ inputs.kv.astype(np.float64).T * inputs.sm_scale
    assert (scores.max(axis=-1) - scores.min(axis=-1)).max() <= 0.2


@pytest.mark.parametrize("words", ["d=512,h=5,topk=100", "d=576,h=3,topk=7,s_kv=64", "topk=3,h=2"])
def test_exact_rows_see_a_power_of_two_of_keys_at_score_zero(words: str) -> None:
    inputs = inputs_of(f"s_q=40,data=exact,length=ragged,invalid=0.3,{words}")
    valid = valid_slots(inputs)
    kv = np.nan_to_num(inputs.kv.astype(np.float64))
    assert np.abs(kv[:, :512]).max() == 8
    seen = 0
    for q, indices, row in zip(inputs.q.astype(np.float64), inputs.indices, valid, strict=True):
        if row.any():
            scores = q @ kv[indices[row]].T * inputs.sm_scale
            visible = (scores == 0).sum(axis=1)
            assert (visible > 0).all() and ((visible & (visible - 1)) == 0).all()
            assert (scores[scores != 0] <= -1000).all()
            seen += 1
    assert seen > 10


def test_a_mixed_sink_holds_both_infinities_and_finite_values() -> None:
    sink = inputs_of("h=128,sink=mixed").attn_sink
    assert sink is not None and sink.dtype == np.float32
    finite = np.isfinite(sink)
    assert finite.sum() > 20 and (sink == np.inf).any() and (sink == -np.inf).any()
    assert np.abs(sink[finite] - np.log(128)).max() < 4


def test_no_tokens_and_no_keys_are_inputs_too() -> None:
    assert inputs_of("s_q=0").q.shape == (0, 64, 512)
    inputs = inputs_of("s_q=3,s_kv=0")
    assert inputs.kv.shape == (0, 512) and not valid_slots(inputs).any()


def test_dtypes_are_the_contract_s() -> None:
    inputs = inputs_of("length=ragged,sink=zero")
    assert inputs.q.dtype == inputs.kv.dtype == ml_dtypes.bfloat16
    assert inputs.indices.dtype == inputs.topk_length.dtype == np.int32


def test_rows_are_a_slice_of_the_same_call() -> None:
    inputs = inputs_of("s_q=5,length=ragged,sink=mixed")
    part = inputs.rows(1, 3)
    assert part.q.shape[0] == 2 and part.kv is inputs.kv
    assert (part.topk_length == inputs.topk_length[1:3]).all()


def test_a_batch_runs_in_the_query_ranges_of_its_plan() -> None:
    fixed = inputs_of("q_lens=0+5+0+3+0,plan=fixed,h=2")
    assert fixed.q.shape[0] == 8 and fixed.chunks == ((0, 5), (5, 8))
    shipped = inputs_of("q_lens=0+5+0+3+0,plan=vllm-0.33.0,h=2")
    assert shipped.chunks == ((0, 0), (0, 5), (5, 5), (5, 8), (8, 8))
