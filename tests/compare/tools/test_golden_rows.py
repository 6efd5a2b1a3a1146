"""Which rows of `out` a recorded result keeps."""

from __future__ import annotations

import numpy as np
import pytest

from compare.judging.attention_call import SparsePrefillInputs
from compare.suites.sparse_prefill.recorded import SparsePrefillRecords
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.recorded import V4PrefillRecords

RECORDS, V4 = SparsePrefillRecords(), V4PrefillRecords()


def inputs_of(line: str) -> SparsePrefillInputs:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, SparsePrefillInputs)
    return inputs


def finite_lse(inputs: SparsePrefillInputs) -> np.ndarray:
    return np.zeros(inputs.q.shape[:2], np.float32)


def test_the_same_seed_gives_the_same_rows_on_every_machine():
    inputs = inputs_of("sparse-prefill:s_q=3,h=8,topk=128,data=flat")
    rows, special = RECORDS.choose_rows(inputs, finite_lse(inputs), seed=7, budget=8)
    assert rows.tolist() == [0, 1, 9, 11, 16, 17, 20, 21]
    assert rows.dtype == np.int32
    assert special == 0


def test_another_seed_gives_other_rows():
    inputs = inputs_of("sparse-prefill:s_q=3,h=8,topk=128,data=flat")
    chosen = {
        tuple(RECORDS.choose_rows(inputs, finite_lse(inputs), s, budget=8)[0]) for s in range(20)
    }
    assert len(chosen) == 20


def test_every_special_row_is_kept_where_there_is_room():
    inputs = inputs_of("sparse-prefill:s_q=40,h=4,topk=128,empty_rows=2,seed=3")
    lse = finite_lse(inputs)
    lse[5, 1] = np.nan
    lse[6, 2] = np.inf
    empty = np.flatnonzero(~((inputs.indices >= 0) & (inputs.indices < 256)).any(1))
    assert len(empty) == 2
    expected = {4 * token + head for token in empty for head in range(4)}
    expected |= {4 * 5 + 1, 4 * 6 + 2}
    rows, special = RECORDS.choose_rows(inputs, lse, seed=3, budget=32)
    assert len(rows) == len(set(rows.tolist())) == 32
    assert expected <= set(rows.tolist())
    assert special == len(expected)


def test_a_row_that_its_length_empties_is_special():
    inputs = inputs_of("sparse-prefill:s_q=2,h=4,topk=128,length=zero")
    assert RECORDS.special_rows(inputs, finite_lse(inputs))["empty"].all()


def test_sinks_without_end_and_at_both_ends_are_special():
    inputs = inputs_of("sparse-prefill:s_q=1,h=6,topk=128")
    sink = np.array([0.5, -np.inf, 2.0, np.nan, -3.0, np.inf], np.float32)
    kinds = RECORDS.special_rows(
        SparsePrefillInputs(
            q=inputs.q, kv=inputs.kv, indices=inputs.indices, sm_scale=1.0, attn_sink=sink
        ),
        finite_lse(inputs),
    )
    assert {kind: np.flatnonzero(rows).tolist() for kind, rows in kinds.items()} == {
        "sink -inf": [1],
        "sink +inf": [5],
        "sink NaN": [3],
        "sink smallest": [4],
        "sink largest": [2],
    }


def test_more_special_rows_than_room_are_spread_over_their_kinds():
    inputs = inputs_of("sparse-prefill:s_q=40,h=64,topk=128,sink=mixed,empty_rows=9,seed=5")
    lse = finite_lse(inputs)
    lse[0, 0] = np.nan
    rows, special = RECORDS.choose_rows(inputs, lse, seed=5)
    kinds = RECORDS.special_rows(inputs, lse)
    assert sum(of.sum() for of in kinds.values()) > len(rows) == RECORDS.share.rows(lse.size)
    kept = {kind: int(of.reshape(-1)[rows].sum()) for kind, of in kinds.items()}
    assert kept.pop("lse not finite") == 1
    assert all(count >= 10 for count in kept.values()), kept
    assert len(rows) - special >= 10


@pytest.mark.parametrize("total", [0, 1, 64, 93, 2048, 8192, 12288, 10**6])
def test_a_case_keeps_its_share_of_the_six_megabytes(total: int):
    share = RECORDS.share
    budget = share.rows(total)
    assert budget == total or 32 <= budget <= 96
    if total <= 8192:
        assert budget * 1024 + total * 8 <= share.bytes


def v4_inputs(line: str) -> V4PrefillInputs:
    inputs = make_inputs(parse_case(f"v4-prefill:{line}"))
    assert isinstance(inputs, V4PrefillInputs)
    return inputs


def test_the_first_and_last_tokens_of_requests_are_special():
    inputs = v4_inputs("seq=300+70+40+9,q=3+4+0+1,start=5,h=2")
    kinds = V4.special_rows(inputs, np.zeros((8, 2), np.float32))
    assert {kind: np.flatnonzero(rows[:, 0]).tolist() for kind, rows in kinds.items()} == {
        "first token": [0, 3, 7],
        "last token": [2, 6, 7],
    }
    assert all((rows[:, 0] == rows[:, 1]).all() for rows in kinds.values())


def test_sinks_of_the_v4_path_are_special_as_those_of_sparse_prefill():
    inputs = v4_inputs("seq=90,q=5,h=16,sink=mixed")
    assert inputs.attn_sink is not None
    kinds = V4.special_rows(inputs, np.zeros((5, 16), np.float32))
    assert (kinds["sink +inf"][0] == (inputs.attn_sink == np.inf)).all()
    assert kinds["sink smallest"].sum() == kinds["sink largest"].sum() == 5


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_a_batch_of_the_v4_path_keeps_its_share(heads: int):
    inputs = v4_inputs(f"seq=300+70,q=10+4,h={heads}")
    rows, _ = V4.choose_rows(inputs, np.zeros((14, heads), np.float32), seed=3)
    share = V4.share
    assert share.fewest <= len(rows) <= share.most
    assert len(rows) == len(set(rows.tolist()))
