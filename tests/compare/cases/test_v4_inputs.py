"""Inputs of the V4 prefill path are the same bytes everywhere, and are what the case says."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compare.generate.tokens import page_stride
from compare.protocol.case import CaseError, parse_case_of
from compare.suites.v4_prefill.call import V4PrefillInputs
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.make import v4_prefill_inputs

BATCH = "seq=300+70+5+40+129,q=3+4+5+0+2"


def case_of(words: str) -> V4PrefillCase:
    case = parse_case_of(V4PrefillCase, words)
    assert isinstance(case, V4PrefillCase)
    return case


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "seq=9,q=1,window=2147483647",
            "topk=64, window=2147483647 and max_image=0 make lists of 2147483776 columns; "
            "accepted are at most 131072",
        ),
        ("seq=9,q=1,ratio=1,max_image=131072", ": window=128 and max_image=131072 make lists of"),
        ("seq=9,q=1,topk=130945", "make lists of 131200 columns"),
        ("seq=9+8,q=1+0,images=1:7-7,max_image=1", "image 1:7-7 is of a request without tokens"),
        ("seq=9,q=2,images=0:6-8,max_image=3", "isn't within this step's tokens, positions 7 to 8"),
        ("seq=9,q=2,images=0:7-8,max_image=1", "is longer than max_image=1"),
    ],
)
def test_a_line_that_is_no_batch_is_refused(words: str, said: str) -> None:
    with pytest.raises(CaseError) as caught:
        case_of(words)
    assert str(caught.value).startswith("v4-prefill: ") and said in str(caught.value)


def test_the_widest_lists_of_a_case_are_accepted() -> None:
    assert case_of("seq=9,q=1,topk=130944").slots == 131072


def inputs_of(words: str) -> V4PrefillInputs:
    return v4_prefill_inputs(case_of(words))


def dequantised(inputs: V4PrefillInputs, *, compressed: bool) -> np.ndarray:
    """[pages, P, 512] float64, read byte by byte: data of all tokens of a page, then their
    scales.
    """
    cache = inputs.compressed_cache if compressed else inputs.swa_cache
    page = inputs.compressed_page if compressed else inputs.swa_page
    assert cache is not None and page is not None
    if inputs.kv_format == "bf16":
        return cache.astype(np.float64)
    data = cache[:, : page * 576].reshape(len(cache), page, 576)
    nope = np.ascontiguousarray(data[..., :448]).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    rope = np.ascontiguousarray(data[..., 448:]).view(ml_dtypes.bfloat16).astype(np.float64)
    scales = cache[:, page * 576 : page * 584].reshape(len(cache), page, 8)[..., :7]
    powers = 2.0 ** (scales.astype(np.float64) - 127)
    powers[scales == 255] = np.nan
    return np.concatenate([nope * np.repeat(powers, 64, axis=-1), rope], axis=-1)


def keys_of(inputs: V4PrefillInputs, request: int, numbers: np.ndarray, *, compressed: bool):
    """[N, 512] of a request's positions or entries, through the block table."""
    table = inputs.compressed_block_table if compressed else inputs.swa_block_table
    page = inputs.compressed_page if compressed else inputs.swa_page
    assert table is not None and page is not None
    whole = dequantised(inputs, compressed=compressed)
    return whole[table[request, numbers // page], numbers % page]


def list_of(case: V4PrefillCase, inputs: V4PrefillInputs, token: int) -> tuple[np.ndarray, ...]:
    """What a token sees, from the rules: its compressed entries and its positions."""
    starts = inputs.query_start_loc - inputs.query_start_loc[0]
    request = int(np.searchsorted(starts, token, side="right")) - 1
    position = int(inputs.seq_lens[request] - (starts[request + 1] - token))
    entries = np.zeros(0, np.int64)
    if inputs.topk_indices is not None:
        count = min((position + 1) // case.ratio, case.topk)
        entries = inputs.topk_indices[token, :count].astype(np.int64)
    first, last = max(0, position - case.window + 1), position
    for owner, a, b in case.images:
        if owner == request and a <= position <= b:
            first = max(0, min(position - case.window + 1, a))
            last = b
    return np.array(request), entries, np.arange(first, last + 1)


@pytest.mark.parametrize(
    ("words", "digest"),
    [
        ("seq=300+70+5,q=3+4+5,h=3,sink=mixed", "8b324f39f3412663"),
        (
            "seq=300+70+0,q=3+0+0,h=2,ratio=128,topk=3,format=bf16,bound=5,start=7,seed=9",
            "635d7d13343509b0",
        ),
        ("seq=300+70,q=3+2,h=5,ratio=2,data=exact,page=32,seed=3", "a81a3a5281662b63"),
        (
            "seq=80,q=20,h=2,ratio=1,data=flat,images=0:62-70,max_image=9,poison=0",
            "18ca739df38a415a",
        ),
        ("seq=90,q=2,h=2,data=peaked,window=8,sink=0.5,plan=alone,chunk=1", "033514bbd8c90417"),
    ],
)
def test_the_bytes_of_a_case_never_change(words: str, digest: str) -> None:
    assert inputs_of(words).sha256().startswith(digest)


@pytest.mark.parametrize("data", ["normal", "exact"])
def test_blocks_don_t_change_the_bytes(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    words = f"{BATCH},h=3,data={data}"
    whole = inputs_of(words).sha256()
    monkeypatch.setattr("compare.generate.blocks.BLOCK_WORDS", 3000)
    assert inputs_of(words).sha256() == whole


def test_dtypes_and_shapes_are_the_contract_s() -> None:
    inputs = inputs_of(f"{BATCH},h=3,sink=mixed,bound=2")
    assert inputs.q.shape == (14, 3, 512) and inputs.q.dtype == ml_dtypes.bfloat16
    for name in ("swa", "compressed"):
        cache, table = getattr(inputs, f"{name}_cache"), getattr(inputs, f"{name}_block_table")
        assert cache.dtype == np.uint8 and cache.shape[1] == 37440
        assert table.dtype == np.int32 and table.shape[0] == 5
    assert inputs.compressed_page == inputs.swa_page == 64
    for name in ("topk_indices", "query_start_loc", "seq_lens", "seq_lens_bound"):
        assert getattr(inputs, name).dtype == np.int32
    assert inputs.seq_lens_bound is not None
    assert (inputs.seq_lens_bound - inputs.seq_lens == 2).all()
    assert inputs.attn_sink is not None and inputs.attn_sink.dtype == np.float32
    assert inputs_of("seq=9,q=1,h=2,format=bf16,page=32").swa_cache.shape == (3, 32, 512)


@pytest.mark.parametrize(("page", "stride"), [(64, 37440), (2, 1728), (256, 149760)])
def test_pages_end_on_a_multiple_of_576_bytes(page: int, stride: int) -> None:
    assert page_stride(page) == stride


@pytest.mark.parametrize("words", [BATCH, f"{BATCH},data=exact", f"{BATCH},ratio=128,page=32"])
def test_a_bfloat16_cache_holds_the_same_keys(words: str) -> None:
    fp8, bf16 = inputs_of(f"{words},h=1"), inputs_of(f"{words},h=1,format=bf16")
    assert fp8.q.tobytes() == bf16.q.tobytes()
    for compressed in (False, True):
        a, b = (dequantised(i, compressed=compressed) for i in (fp8, bf16))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ratio", [2, 4, 128])
def test_a_list_holds_distinct_entries_that_the_token_sees_packed_to_the_left(ratio: int) -> None:
    case = case_of(f"seq=700+130+3,q=9+6+3,h=1,ratio={ratio},topk=20")
    inputs = v4_prefill_inputs(case)
    assert inputs.topk_indices is not None
    positions = [*range(691, 700), *range(124, 130), *range(3)]
    for row, position in zip(inputs.topk_indices, positions, strict=True):
        seen = (position + 1) // ratio
        count = min(seen, 20)
        assert len(set(row[:count].tolist())) == count
        assert (row[:count] >= 0).all() and (row[:count] < max(seen, 1)).all()
        assert (row[count:] == -1).all()
        if ratio == 128:
            assert row[:count].tolist() == list(range(count))
    # Where there are more than the list holds, another token chooses others.
    assert ratio == 128 or inputs.topk_indices[0].tolist() != inputs.topk_indices[1].tolist()


@pytest.mark.parametrize("words", [BATCH, f"{BATCH},data=exact", f"{BATCH},format=bf16,ratio=128"])
def test_all_that_a_token_sees_is_finite_and_all_else_is_nan(words: str) -> None:
    case = case_of(f"{words},h=1")
    inputs = v4_prefill_inputs(case)
    for compressed in (False, True):
        whole = dequantised(inputs, compressed=compressed)
        table = inputs.compressed_block_table if compressed else inputs.swa_block_table
        page = inputs.compressed_page if compressed else inputs.swa_page
        assert table is not None and page is not None
        held = np.zeros(whole.shape[:2], bool)
        for request, (seq, q) in enumerate(zip(case.seq, case.q, strict=True)):
            if not q:
                continue
            first, end = (0, seq // case.ratio) if compressed else (max(0, seq - q - 127), seq)
            numbers = np.arange(first, end)
            held[table[request, numbers // page], numbers % page] = True
        assert np.isfinite(whole[held]).all() and np.isnan(whole[~held]).all()
        assert held.any() and (~held).all(axis=1).sum() >= 2
    for token in range(case.tokens):
        request, entries, window = list_of(case, inputs, token)
        assert np.isfinite(keys_of(inputs, int(request), window, compressed=False)).all()
        assert np.isfinite(keys_of(inputs, int(request), entries, compressed=True)).all()


def test_padding_bytes_hold_what_must_not_be_read() -> None:
    inputs = inputs_of("seq=40,q=2,h=1,ratio=128")
    assert (inputs.swa_cache[:, 64 * 584 :] == 0xA5).all()
    assert (inputs.swa_cache[:, 64 * 576 : 64 * 584].reshape(-1, 8)[:, 7] == 0xA5).all()
    clean = inputs_of("seq=40,q=2,h=1,ratio=128,poison=0")
    assert (clean.swa_cache[:, 64 * 584 :] == 0).all()
    assert not np.isnan(dequantised(clean, compressed=False)).any()


def test_entries_that_no_token_needs_name_no_page_or_one_of_somebody() -> None:
    inputs = inputs_of("seq=700+70+5+0,q=3+4+5+0,h=1,page=32")
    # Positions 570 and up of the first request, 0 and up of the others; nothing of the last.
    needed = np.zeros(inputs.swa_block_table.shape, bool)
    needed[0, 17:22] = needed[1, :3] = needed[2, :1] = True
    pages = inputs.swa_block_table[needed]
    assert len(set(pages.tolist())) == len(pages) == 9
    assert ((pages >= 0) & (pages < len(inputs.swa_cache))).all()
    stale = inputs.swa_block_table[~needed]
    outside = (stale < 0) | (stale >= len(inputs.swa_cache))
    assert outside.any() and (~outside).any()
    clean = inputs_of("seq=700+70+5+0,q=3+4+5+0,h=1,page=32,poison=0")
    assert (clean.swa_block_table[~needed[:, :-1]] == 0).all()


def test_scales_differ_from_group_to_group_and_stay_in_the_range_that_all_readers_share() -> None:
    inputs = inputs_of("seq=700,q=3,h=1")
    scales = inputs.swa_cache[inputs.swa_block_table[0, 9:10], 64 * 576 : 64 * 584]
    used = scales.reshape(-1, 8)[:, :7]
    assert used.min() >= 90 and used.max() <= 140 and len(np.unique(used)) > 15


def test_flat_scores_spread_less_than_a_fifth() -> None:
    case = case_of("seq=3000,q=2,h=4,topk=600,data=flat")
    inputs = v4_prefill_inputs(case)
    request, entries, window = list_of(case, inputs, 1)
    keys = np.concatenate(
        [
            keys_of(inputs, int(request), entries, compressed=True),
            keys_of(inputs, int(request), window, compressed=False),
        ]
    )
    assert len(keys) == 728
    scores = inputs.q[1].astype(np.float64) @ keys.T * inputs.sm_scale
    assert 0 < (scores.max(axis=-1) - scores.min(axis=-1)).max() <= 0.2


@pytest.mark.parametrize(
    "words",
    [
        "seq=300+70+5+1,q=3+4+5+1,h=6",
        "seq=300+40,q=16+9,h=5,ratio=1,window=8",
        "seq=1500+260,q=3+5,h=4,ratio=128,topk=4,format=bf16",
        "seq=130+129,q=4+2,h=9,ratio=2,topk=33,images=0:126-129,max_image=4",
    ],
)
def test_exact_rows_see_a_power_of_two_of_keys_at_score_zero(words: str) -> None:
    case = case_of(f"{words},data=exact")
    inputs = v4_prefill_inputs(case)
    for token in range(case.tokens):
        request, entries, window = list_of(case, inputs, token)
        keys = keys_of(inputs, int(request), window, compressed=False)
        if case.ratio > 1:
            own = keys_of(inputs, int(request), entries, compressed=True)
            keys = np.concatenate([own, keys])
        assert (keys == np.round(keys)).all() and np.abs(keys).max() <= 8
        scores = inputs.q[token].astype(np.float64) @ keys.T * inputs.sm_scale
        assert ((scores == 0) | (scores <= -1000)).all()
        matched = (scores == 0).sum(axis=1)
        assert (matched > 0).all() and ((matched & (matched - 1)) == 0).all()
        # Every key of the list counts in some head, so that one left out is seen.
        if case.h >= 4:
            assert (scores == 0).any(axis=0).all()


def test_keys_past_an_exact_row_s_list_would_count() -> None:
    """One position too many before the window, or one too late, changes every row."""
    case = case_of("seq=300,q=3,h=8,data=exact")
    inputs = v4_prefill_inputs(case)
    for token, position in enumerate(range(297, 300)):
        outside = np.array([p for p in (position - 128, position + 1) if 170 <= p < 300])
        keys = keys_of(inputs, 0, outside, compressed=False)
        assert (inputs.q[token].astype(np.float64) @ keys.T == 0).all()
        assert token == 0 or len(keys) >= 1


def test_a_batch_without_requests_or_tokens_is_one_too() -> None:
    for data in ("normal", "exact"):
        inputs = inputs_of(f"seq=none,q=none,h=2,start=3,data={data}")
        assert inputs.q.shape == (0, 2, 512) and inputs.swa_block_table.shape == (0, 2)
        assert inputs.query_start_loc.tolist() == [3]
        inputs = inputs_of(f"seq=0+90,q=0+0,h=2,data={data}")
        assert inputs.q.shape == (0, 2, 512) and inputs.seq_lens.tolist() == [0, 90]
        assert np.isnan(dequantised(inputs, compressed=False)).all()


def test_images_belong_to_their_requests() -> None:
    inputs = inputs_of("seq=30+40+9,q=9+9+2,h=1,images=1:31-33+0:21-22+1:36-39,max_image=5")
    assert inputs.image_spans == (((21, 22),), ((31, 33), (36, 39)), ())
    assert inputs.max_image_tokens == 5 and inputs_of("seq=30,q=9,h=1").image_spans is None


@pytest.mark.parametrize(("words", "values"), [("zero", [0.0] * 3), ("-inf", [-np.inf] * 3)])
def test_a_sink_is_one_number_for_all_heads(words: str, values: list[float]) -> None:
    sink = inputs_of(f"seq=9,q=1,h=3,sink={words}").attn_sink
    assert sink is not None and sink.tolist() == values


def test_mixed_sinks_are_infinite_either_way_and_near_the_weight_of_a_full_list() -> None:
    sink = inputs_of("seq=9,q=1,h=128,sink=mixed").attn_sink
    assert sink is not None
    assert (sink == np.inf).any() and (sink == -np.inf).any()
    finite = sink[np.isfinite(sink)]
    assert len(finite) > 10 and np.abs(finite - np.log(256)).max() < 3
