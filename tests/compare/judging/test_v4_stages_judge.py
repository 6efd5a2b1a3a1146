"""Single stages of the V4 prefill path: every number and every bit, the first difference named."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compare.protocol.verdict import Status
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.judge import judge
from compare.suites.v4_stages.rules import right_arrays
from compare.suites.v4_stages.torch_adapter import TorchV4Stages

COMBINE = "v4-stages:stage=combine,seq=40+60,q=4+6,topk=12,window=24,seed=8401"
IMAGES = (
    "v4-stages:stage=combine,seq=60+9,q=30+2,topk=16,window=8,images=0:32-55+0:50-57,"
    "max_image=24,start=5,bound=3,seed=8402"
)
SLOTS = "v4-stages:stage=global_topk,seq=300+70+5,q=3+4+5,pad=3,seed=8403"
GATHERS = (
    "v4-stages:stage=gather,seq=300+70+5+40,q=3+4+5+0,ratio=1,offset=5,spare=3,seed=8404",
    "v4-stages:stage=gather,seq=90+40+9,q=3+4+1,ratio=4,format=bf16,spare=2,seed=8405",
    "v4-stages:stage=gather,seq=300+260,q=3+2,ratio=128,offset=1,seed=8406",
)
M = 44  # of COMBINE: 15 entries and 29 positions


def inputs_of(case: str) -> V4StagesInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, V4StagesInputs)
    return inputs


def changed(inputs: V4StagesInputs, name: str, place: tuple, value: object) -> V4StagesResult:
    """What is due, with some elements changed."""
    arrays = {n: a.copy() for n, a in right_arrays(inputs).items()}
    arrays[name][place] = value
    return V4StagesResult(arrays=arrays)


@pytest.mark.parametrize("case", [COMBINE, IMAGES, SLOTS, *GATHERS])
def test_the_reference_gives_what_the_rules_ask_for(case):
    inputs = inputs_of(case)
    verdict = judge(inputs, TorchV4Stages("torch").run(inputs))
    assert verdict.status is Status.PASS, verdict.reason
    assert verdict.diagnosis == () == verdict.worst


def test_the_rules_give_known_rows_of_two_requests():
    # vllm-project/vllm#41834: (seq, q) = (6, 3), (21, 2), offsets from 7 on, N = 5, M = 14.
    inputs = V4StagesInputs(
        stage="combine",
        arguments={
            "topk_indices": np.array([[0, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] * 2, np.int32),
            "query_start_loc": np.array([7, 10, 12], np.int32),
            "seq_lens": np.array([6, 21], np.int32),
            "gather_lens": np.array([6, 9], np.int32),
            "window": 8,
            "compress_ratio": 4,
            "topk": 4,
            "workspace_rows": 14,
            "compressed_rows": 5,
            "image_left": None,
            "image_right": None,
            "max_image_tokens": 0,
        },
    )
    found = right_arrays(inputs)
    assert found["lengths"].tolist() == [5, 6, 7, 12, 12]
    rows = [row[:n].tolist() for row, n in zip(found["indices"], found["lengths"], strict=True)]
    assert rows == [
        [0, 5, 6, 7, 8],
        [0, 5, 6, 7, 8, 9],
        [0, 5, 6, 7, 8, 9, 10],
        [14, 15, 16, 17, *range(19, 27)],
        [14, 15, 16, 17, *range(20, 28)],
    ]
    assert found["indices"].shape == (5, 128)
    assert (found["indices"][2, 7:] == -1).all()


def test_the_rules_keep_an_entry_of_minus_one_in_its_place():
    inputs = V4StagesInputs(
        stage="global_topk",
        arguments={
            "topk_indices": np.array([[3, -1, 4], [0, 1, -1]], np.int32),
            "token_to_request": np.array([1, 0], np.int32),
            "block_table": np.array([[5, 6, 9], [2, 0, 7]], np.int32),
            "page_size": 2,
            "is_valid_token": np.array([True, False]),
        },
    )
    found = right_arrays(inputs)
    assert found["slots"].tolist() == [[1, -1, 14], [10, 11, -1]]
    assert found["lengths"].tolist() == [2, 0]


def test_the_rules_read_every_code_under_every_scale():
    # One token on a page of one: 448 codes, 64 bfloat16, 7 scales, a byte of padding.
    codes = np.arange(448) % 256
    rope = np.arange(64, dtype=np.float32).astype(ml_dtypes.bfloat16)
    for scales in ([0, 1, 90, 127, 140, 254, 255], [126, 128, 120, 119, 105, 200, 30]):
        page = np.full(1152, 0xA5, np.uint8)
        page[:448] = codes
        page[448:576] = rope.view(np.uint8)
        page[576:583] = scales
        inputs = V4StagesInputs(
            stage="gather",
            arguments={
                "cache": page[None],
                "page_size": 1,
                "kv_format": "v4-fp8",
                "block_table": np.zeros((1, 1), np.int32),
                "seq_lens": np.ones(1, np.int32),
                "gather_lens": None,
                "offset": 0,
                "workspace": np.zeros((1, 1, 512), ml_dtypes.bfloat16),
            },
        )
        row = right_arrays(inputs)["workspace"][0, 0]
        stored = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for g, scale in enumerate(scales):
            part = stored[64 * g : 64 * g + 64]
            due = part * (2.0 ** (scale - 127) if scale < 255 else np.nan)
            with np.errstate(over="ignore"):
                due = due.astype(np.float32).astype(ml_dtypes.bfloat16)
            assert np.array_equal(row[64 * g : 64 * g + 64], due, equal_nan=True)
        assert np.array_equal(row[448:], rope)


def test_the_rules_read_a_float32_scale_as_it_is():
    # Two tokens on a page: 512 codes, 4 scales, 64 bfloat16 each. Of 448 * 3 the float32 is exact.
    page = np.zeros((1, 2, 656), np.uint8)
    page[0, 1, :512] = np.array([0x7E, 0x39, 0xB8, 0x01], np.uint8).repeat(128)  # 448, 1.125, -1
    page[0, 1, 512:528] = np.array([3, 1.0078125 + 2**-20, 0.1, 2], np.float32).view(np.uint8)
    page[0, 1, 528:] = np.arange(64).astype(ml_dtypes.bfloat16).view(np.uint8)
    inputs = V4StagesInputs(
        stage="gather",
        arguments={
            "cache": page.reshape(1, -1),
            "page_size": 2,
            "kv_format": "v3.2-fp8",
            "block_table": np.zeros((1, 1), np.int32),
            "seq_lens": np.full(1, 2, np.int32),
            "gather_lens": np.ones(1, np.int32),
            "offset": 0,
            "workspace": np.zeros((1, 1, 576), ml_dtypes.bfloat16),
        },
    )
    row = right_arrays(inputs)["workspace"][0, 0].astype(np.float64)
    # 1.125 * 1.0078125 = 1.1337890625, next to 1.1328125 in bfloat16; 0.1 is 0.10009765625.
    assert row[0:512:128].tolist() == [1344.0, 1.1328125, -0.10009765625, 2.0**-8]
    assert row[512:].tolist() == list(range(64))


def test_the_rules_write_known_bytes():
    # Groups of 448, of 449 (twice the scale), of nothing and of numbers below the floor.
    values = np.zeros((2, 512), np.float32)
    values[1, 0], values[1, 1] = 448.0, -30.5
    values[1, 64], values[1, 65] = 449.0, 17.0
    values[1, 192] = 2.0**-20
    values[1, 448:451] = 1.00390625, 1.01171875, -3.0
    inputs = V4StagesInputs(
        stage="quantise",
        arguments={
            "cache": np.full((2, 1728), 0xA5, np.uint8),
            "page_size": 2,
            "kv_format": "v4-fp8",
            "values": values,
            "slot_mapping": np.array([-1, 3], np.int32),
        },
    )
    cache = right_arrays(inputs)["cache"]
    assert (cache[0] == 0xA5).all() and (cache[1, :576] == 0xA5).all()
    token = cache[1, 576:1152]
    # e4m3: 448 is 0x7E; -30.5 is next to -30; 449 / 2 is 224; 17 / 2 is a tie, to 8.
    assert token[[0, 1, 64, 65, 128]].tolist() == [0x7E, 0xDF, 0x76, 0x50, 0]
    # 2^-20 over 2^-22 is 4.
    assert token[192] == 0x48 and cache[1, 1160:1168].tolist() == [127, 128, *[105] * 5, 0]
    # Halves to even in bfloat16 as well: 1.0 and 1.015625.
    rope = token[448:454].view(ml_dtypes.bfloat16).astype(np.float64)
    assert rope.tolist() == [1.0, 1.015625, -3.0]
    assert (cache[1, 1152:1160] == 0xA5).all() and (cache[1, 1168:] == 0xA5).all()


def test_one_wrong_index_is_named_with_its_place_and_both_values():
    inputs = inputs_of(COMBINE)
    due = int(right_arrays(inputs)["indices"][5, 12])
    verdict = judge(inputs, changed(inputs, "indices", (5, 12), 3))
    assert verdict.status is Status.NUMERIC
    assert verdict.reason == (
        f"combine: indices[5, 12] is 3; {due} is due for request 1, position 55 (1 of 10 rows "
        "differ)"
    )
    assert [found.name for found in verdict.diagnosis] == ["wrong-indices"]
    (worst,) = verdict.worst
    assert (worst.tensor, worst.index, worst.got, worst.expected) == ("indices", (5, 12), 3, due)


def test_what_stands_behind_a_list_counts_too():
    inputs = inputs_of(COMBINE)
    assert right_arrays(inputs)["indices"][5, 127] == -1
    verdict = judge(inputs, changed(inputs, "indices", (5, 127), 0))
    assert verdict.reason.startswith("combine: indices[5, 127] is 0; -1 is due for request 1")


def test_a_difference_that_all_rows_share_is_told():
    inputs = inputs_of(COMBINE)
    arrays = right_arrays(inputs)
    arrays["indices"][4:] = np.where(arrays["indices"][4:] >= 0, arrays["indices"][4:] - M, -1)
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert verdict.diagnosis[0].sentence.endswith("; each that differs is 44 = M too small")


def test_lengths_are_judged_beside_the_lists():
    inputs = inputs_of(IMAGES)
    due = int(right_arrays(inputs)["lengths"][7])
    verdict = judge(inputs, changed(inputs, "lengths", (7,), due - 1))
    assert verdict.reason == (
        f"combine: lengths[7] is {due - 1}; {due} is due for request 0, position 37 (1 of 32 "
        "elements differ)"
    )
    assert [found.name for found in verdict.diagnosis] == ["wrong-lengths"]


def test_a_wrong_slot_says_whose_token_it_is():
    inputs = inputs_of(SLOTS)
    verdict = judge(inputs, changed(inputs, "slots", (12, 0), -1))
    assert "global_topk: slots[12, 0] is -1; " in verdict.reason
    assert "is due for request 0, a token of padding (1 of 15 rows differ)" in verdict.reason
    verdict = judge(inputs, changed(inputs, "lengths", (12,), 3))
    assert verdict.reason.startswith("global_topk: lengths[12] is 3; 0 is due for request 0, a tok")


@pytest.mark.parametrize("case", GATHERS)
def test_a_wrong_bit_of_a_gathered_row_is_named(case):
    inputs = inputs_of(case)
    row = int(inputs.arguments["offset"]) + 1
    wrong = changed(inputs, "workspace", (1, row, 500), 0.25)
    due = float(right_arrays(inputs)["workspace"][1, row, 500])
    verdict = judge(inputs, wrong)
    assert verdict.status is Status.NUMERIC
    assert verdict.reason.startswith(
        f"gather: workspace[1, {row}, 500] is 0.25; {due:g} is due, of token "
    )
    assert "(1 of " in verdict.reason
    assert [found.name for found in verdict.diagnosis] == ["wrong-rows"]


def test_a_row_that_holds_another_token_says_which():
    inputs = inputs_of(GATHERS[0])
    before = right_arrays(inputs)["workspace"]
    verdict = judge(inputs, changed(inputs, "workspace", (1, 6), before[0, 9]))
    # 130 of the first request's 300 tokens are gathered: row 5 + 4 holds token 174.
    assert verdict.diagnosis[0].sentence.endswith("; the row holds token 174 of request 0")


def test_rows_that_nothing_is_gathered_to_must_stay():
    inputs = inputs_of(GATHERS[0])
    for place in ((0, 4, 0), (2, 12, 3), (0, -1, 511)):
        before = float(right_arrays(inputs)["workspace"][place])
        verdict = judge(inputs, changed(inputs, "workspace", place, before + 1.0))
        assert [found.name for found in verdict.diagnosis] == ["touched-rows"]
        assert f"{before:g} stood there and must stay" in verdict.reason


def test_a_nan_that_stood_there_stays_bit_for_bit():
    inputs = inputs_of(GATHERS[1])
    workspace = np.full_like(inputs.arguments["workspace"], np.nan)
    inputs = V4StagesInputs(stage="gather", arguments={**inputs.arguments, "workspace": workspace})
    arrays = right_arrays(inputs)
    assert judge(inputs, V4StagesResult(arrays=arrays)).status is Status.PASS
    arrays["workspace"].view(np.uint16)[1, -1, 0] = 0x7FC1
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert [found.name for found in verdict.diagnosis] == ["touched-rows"]


def test_any_nan_is_as_good_as_another_where_one_is_gathered():
    inputs = inputs_of(GATHERS[1])
    cache = np.full_like(inputs.arguments["cache"], np.nan)
    inputs = V4StagesInputs(stage="gather", arguments={**inputs.arguments, "cache": cache})
    arrays = right_arrays(inputs)
    arrays["workspace"].view(np.uint16)[0, 0, 0] = 0xFFFF
    assert judge(inputs, V4StagesResult(arrays=arrays)).status is Status.PASS


def test_forms_that_do_not_fit_are_named():
    inputs = inputs_of(COMBINE)
    right = right_arrays(inputs)
    for arrays, status, words in (
        ({"indices": right["indices"]}, Status.SHAPE, "lengths is missing; indices, lengths are"),
        (
            right | {"indices": right["indices"][:, :64]},
            Status.SHAPE,
            "indices has the shape [10, 64]; [10, 128] is due",
        ),
        (
            right | {"lengths": right["lengths"].astype(np.int64)},
            Status.DTYPE,
            "lengths is int64; int32 is due",
        ),
    ):
        verdict = judge(inputs, V4StagesResult(arrays=arrays))
        assert verdict.status is status
        assert verdict.reason.startswith(words)


def test_a_wrong_reference_is_not_believed():
    inputs = inputs_of(COMBINE)
    right = V4StagesResult(arrays=right_arrays(inputs), notes=("padded",))
    wrong = changed(inputs, "indices", (0, 0), 9)
    verdict = judge(inputs, right, wrong)
    assert verdict.status is Status.PASS
    assert verdict.reference_failed is not None
    assert verdict.reference_failed.startswith("combine: indices[0, 0] is 9; ")
    assert judge(inputs, right, right).reference_failed is None
    assert judge(inputs, right, right).notes == ("padded", "reference: padded")


def test_arguments_that_name_no_place_are_refused():
    inputs = inputs_of(SLOTS)
    given = {**inputs.arguments, "block_table": inputs.arguments["block_table"][:, :1]}
    bad = V4StagesInputs(stage="global_topk", arguments=given)
    with pytest.raises(ValueError, match=r"block_table: 1 columns of pages of 64; accepted are"):
        judge(bad, V4StagesResult(arrays={}))
    gather = inputs_of(GATHERS[1])
    given = {**gather.arguments, "cache": gather.arguments["cache"][:1]}
    with pytest.raises(ValueError, match=r"block_table: request 0 names pages \d to \d; accepted"):
        judge(V4StagesInputs(stage="gather", arguments=given), V4StagesResult(arrays={}))
    with pytest.raises(ValueError, match="profile: 'loose'"):
        judge(inputs, V4StagesResult(arrays={}), profile="loose")


def test_results_recorded_from_the_engine_are_what_the_rules_ask_for():
    from compare.goldens.implementation import GoldenImplementation
    from compare.suites.table import SUITES

    recorded = GoldenImplementation("engine/vllm-0.33.0-stages", SUITES)
    entries = recorded.manifest.entries
    assert len(entries) == 42
    for entry in entries:
        inputs = inputs_of(entry.case)
        result = recorded.run(inputs)
        assert isinstance(result, V4StagesResult)
        verdict = judge(inputs, result)
        assert verdict.status is Status.PASS, f"{entry.case}: {verdict.reason}"
