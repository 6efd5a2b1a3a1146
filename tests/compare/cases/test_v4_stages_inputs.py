"""Inputs of single stages of the V4 path, made from a batch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compare.protocol.case import CaseError, parse_case_of
from compare.suites.v4_stages.case import V4StagesCase
from compare.suites.v4_stages.make import v4_stages_inputs


def arguments_of(words: str) -> dict[str, Any]:
    case = parse_case_of(V4StagesCase, words)
    assert isinstance(case, V4StagesCase)
    made = v4_stages_inputs(case)
    assert made.stage == case.stage and made.case == case
    return dict(made.arguments)


@pytest.mark.parametrize(
    ("words", "digest"),
    [
        ("stage=combine,seq=300+70,q=3+4,start=7,bound=9", "08c01bf6677d3834"),
        ("stage=combine,seq=300+70,q=3+4,ratio=1,images=1:67-68,max_image=2", "c1ad318675385baa"),
        ("stage=global_topk,seq=300+70,q=3+4,topk=9,pad=2", "e4ecf6c13076d6b1"),
        ("stage=gather,seq=300+70,q=3+4,ratio=128,offset=1,spare=2", "c35daa934122c64a"),
        ("stage=gather,seq=300+70,q=3+4,ratio=1,page=32,format=bf16,seed=4", "c5ce479d86187fb2"),
        ("stage=gather,seq=70,q=4,ratio=1,page=32,format=v3.2-fp8,seed=4", "8cf301d5a10a15da"),
        ("stage=gather,seq=70,q=4,ratio=1,page=32,format=bf16-576,seed=4", "ec7d40fe521f47a7"),
        ("stage=quantise,seq=70,q=4,ratio=1,page=32,pad=1", "fd28b6a9feba80cc"),
        ("stage=quantise,seq=70,q=4,ratio=1,page=32,format=v3.2-fp8", "ac7e15911ca9c06b"),
        ("stage=paged_swa,seq=300+70,q=3+4,ratio=1,replay=9,pad=2,spare=1", "7cb8341b92450f39"),
        ("stage=c128,seq=300+70,q=3+4,start=2,topk=75,pad=1", "83ce34d08ecdce7d"),
        ("stage=dspark,seq=300+70,q=3+4,ratio=1,pad=1,spare=2", "30431c36fa297b51"),
    ],
)
def test_the_bytes_of_a_case_never_change(words: str, digest: str) -> None:
    case = parse_case_of(V4StagesCase, words)
    assert v4_stages_inputs(case).sha256().startswith(digest)  # type: ignore[arg-type]


def test_the_combined_chunk_is_that_of_the_host_s_bounds() -> None:
    made = arguments_of("stage=combine,seq=300+70+600,q=3+4+0,start=7,bound=40")
    assert made["query_start_loc"].tolist() == [7, 10, 14, 14]
    assert made["gather_lens"].tolist() == [130, 70, 127]
    # 640 // 4 entries, 3 + 127 and 4 + 106 positions; the zero-query request counts too.
    assert (made["compressed_rows"], made["workspace_rows"]) == (160, 160 + 130)
    assert made["topk_indices"].shape == (7, 64) and made["topk"] == 64
    assert made["image_left"] is None and made["image_right"] is None


def test_without_a_compressed_cache_there_is_no_list() -> None:
    made = arguments_of("stage=combine,seq=300,q=3,ratio=1")
    assert made["topk_indices"].shape == (3, 0)
    assert (made["topk"], made["compressed_rows"]) == (0, 0)


def test_a_token_s_image_reaches_to_both_of_its_ends() -> None:
    made = arguments_of(
        "stage=combine,seq=20+30,q=5+4,ratio=1,images=0:16-18+1:26-29+0:18-19,max_image=4"
    )
    assert made["image_left"].tolist() == [0, 0, 1, 0, 1, 0, 1, 2, 3]
    assert made["image_right"].tolist() == [0, 2, 1, 1, 0, 3, 2, 1, 0]
    assert made["image_left"].dtype == made["image_right"].dtype == np.int32


def test_padding_tokens_of_global_topk_belong_to_no_request() -> None:
    made = arguments_of("stage=global_topk,seq=300+70,q=2+1,topk=9,pad=2")
    assert made["is_valid_token"].tolist() == [True] * 3 + [False] * 2
    assert made["token_to_request"].tolist() == [0, 0, 1, 0, 0]
    assert made["topk_indices"].shape == (5, 9) and made["topk_indices"].dtype == np.int32
    assert made["page_size"] == 64 and (made["topk_indices"][3:] >= 0).any()


def test_padding_of_a_list_of_slots_is_drawn_from_the_batch() -> None:
    made = arguments_of("stage=paged_swa,seq=300+70,q=3+4,start=5,ratio=1,pad=2,spare=3")
    mapped = made["slot_mapping"]
    assert len(mapped) == 10 and mapped.dtype == np.int32
    assert (mapped[:7] < 0).sum() == 2 and (mapped[7:] == -1).all()
    assert made["query_start_loc"].tolist() == [5, 8, 12] and made["width"] == 128
    assert made["image_left"] is None and made["replay_start"] is None


def test_a_replay_starts_at_most_where_this_step_does() -> None:
    made = arguments_of("stage=paged_swa,seq=300+70,q=3+4,ratio=1,replay=100")
    assert made["replay_start"].tolist() == [100, 66]


def test_the_pages_of_a_draft_block_hold_its_whole_window() -> None:
    # Position 192 is its first, one more than a window that counts the token itself has.
    made = arguments_of("stage=dspark,seq=325,q=5,ratio=1")
    assert made["num_speculative_tokens"] == 5 and made["window"] == 128
    pages = made["block_table"][0, 3:6]
    assert len(set(pages.tolist())) == 3 and ((pages >= 0) & (pages < 5)).all()


def test_all_entries_fit_lists_of_topk_columns() -> None:
    made = arguments_of("stage=c128,seq=1536+90,q=1+2,ratio=128,topk=12")
    assert (made["width"], made["page_size"], made["compress_ratio"]) == (12, 2, 128)
    assert made["block_table"].shape == (2, 7)


def test_values_to_quantise_are_of_all_kinds() -> None:
    made = arguments_of("stage=quantise,seq=300+70,q=290+60,ratio=1,pad=4,page=32")
    values, slots = made["values"], made["slot_mapping"]
    assert values.dtype == np.float32 and values.shape == (350, 512)
    assert (slots < 0).sum() == 4 and len(np.unique(slots[slots >= 0])) == 346
    amax = np.abs(values.astype(np.float64).reshape(350, 8, 64)).max(axis=-1)[:, :7]
    assert (amax == 0).any() and ((amax > 0) & (amax < 1e-4)).any() and amax.max() > 100
    mantissa, _ = np.frexp(amax / 448)
    assert 0.05 < (mantissa == 0.5).mean() < 0.2
    wide = arguments_of("stage=quantise,seq=9,q=3,ratio=1,format=v3.2-fp8")
    assert wide["values"].shape == (3, 576)


def test_scales_of_v32_pages_are_powers_of_two_and_others() -> None:
    made = arguments_of("stage=gather,seq=300,q=200,ratio=1,window=101,format=v3.2-fp8")
    assert made["cache"].shape[1] == 64 * 656 and made["workspace"].shape == (1, 300, 576)
    position = np.arange(300)
    pages = made["block_table"][0, position // 64]
    tokens = made["cache"].reshape(-1, 64, 656)[pages, position % 64]
    assert set(np.unique(tokens[:, :512])) == set(range(256)) - {0x7F, 0xFF}
    scales = np.ascontiguousarray(tokens[:, 512:528]).view(np.float32)
    mantissa, exponent = np.frexp(scales)
    assert (exponent.min(), exponent.max()) == (-36, 13)
    assert 0.4 < (mantissa == 0.5).mean() < 0.6
    wide = arguments_of("stage=gather,seq=300,q=200,ratio=1,window=101,format=bf16-576")
    read = wide["cache"][pages, position % 64]
    assert wide["cache"].shape[1:] == (64, 576) and np.isfinite(read.astype(np.float32)).all()
    rope = np.ascontiguousarray(tokens[:, 528:]).view(ml_dtypes.bfloat16)
    assert read[:, 512:].tobytes() == rope.tobytes()


@pytest.mark.parametrize("kv_format", ["v4-fp8", "bf16"])
def test_gathered_numbers_are_all_kinds_of_finite_ones(kv_format: str) -> None:
    words = f"stage=gather,seq=900,q=500,ratio=1,format={kv_format},offset=3,spare=2"
    made = arguments_of(words)
    table, page = made["block_table"][0], made["page_size"]
    position = np.arange(273, 900)
    if kv_format == "bf16":
        read = made["cache"][table[position // page], position % page].astype(np.float32)
        assert np.isfinite(read).all() and np.abs(read[:, :448]).max() > 448 * 2**12
        return
    tokens = made["cache"][table[position // page]]
    data = tokens[:, : page * 576].reshape(-1, page, 576)[np.arange(len(position)), position % page]
    scales = tokens[:, page * 576 : page * 584].reshape(-1, page, 8)
    used = scales[np.arange(len(position)), position % page, :7]
    assert set(np.unique(data[:, :448])) == set(range(256)) - {0x7F, 0xFF}
    assert set(np.unique(used)) == set(range(90, 141))
    rope = np.ascontiguousarray(data[:, 448:]).view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isfinite(rope).all() and np.abs(rope).max() > 1e30


def test_the_workspace_of_a_gather_holds_numbers_of_its_own() -> None:
    made = arguments_of("stage=gather,seq=300+70,q=3+4,ratio=1,offset=3,spare=2")
    assert made["workspace"].shape == (2, 3 + 130 + 2, 512)
    assert made["workspace"].dtype == ml_dtypes.bfloat16
    assert np.isfinite(made["workspace"].astype(np.float32)).all()
    assert made["gather_lens"].tolist() == [130, 70]
    compressed = arguments_of("stage=gather,seq=300+70,q=3+4,ratio=4")
    assert compressed["gather_lens"] is None and compressed["seq_lens"].tolist() == [75, 17]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("stage=combine,record=3,seq=9,q=1", "write v4-stages:stage=combine,record=3"),
        ("stage=gather,seq=9,q=1,pad=1", "pad is for stage=global_topk, not gather"),
        ("stage=combine,seq=9,q=1,offset=1", "offset is for stage=gather, not combine"),
        ("stage=global_topk,seq=9,q=1,ratio=1", "stage=global_topk is of a compressed cache"),
        ("stage=combine,seq=9,q=10", "v4-stages: request 0 has q=10 tokens of seq=9"),
        ("stage=gathr", "combine | global_topk | gather"),
        ("stage=c128,seq=300,q=1,ratio=1", "stage=c128 is of a compressed cache; ratio is 2 up"),
        ("stage=c128,seq=300,q=1,topk=74", "stage=c128 lists 75 entries in topk=74"),
        ("stage=dspark,seq=9,q=1", "stage=dspark has no compressed cache; write ratio=1"),
        ("stage=paged_swa,seq=9,q=1,ratio=1,pad=2", "pad=2 of the batch's 1 tokens"),
        ("stage=combine,seq=9,q=1,replay=1", "replay is for stage=paged_swa, not combine"),
        ("stage=c128,seq=9,q=1,spare=1", "not c128 (but for paged_swa, dspark too)"),
        ("stage=gather,seq=9,q=1,format=bf16-576", "format=bf16-576 is for stage=gather,ratio=1"),
        ("seq=9,q=1", "stage is missing; accepted: combine | global_topk | gather"),
    ],
)
def test_a_wrong_line_is_refused(words: str, said: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_case_of(V4StagesCase, words)
    assert said in str(caught.value)
