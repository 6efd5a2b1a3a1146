"""Inputs of decode are the same bytes everywhere, and the ranks' shards are one batch dealt out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compare.protocol.case import CaseError
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.table import make_inputs, parse_case

BATCH = "lens=301+97+5,q=8+1+2,h=3,world=4,interleave=4"


def inputs_of(words: str) -> DcpDecodeInputs:
    made = make_inputs(parse_case(f"dcp-decode:{words}"))
    assert isinstance(made, DcpDecodeInputs)
    return made


def keys_of(inputs: DcpDecodeInputs, request: int) -> np.ndarray:
    """A request's keys on this rank, in local order, read through the block table."""
    length, page = int(inputs.seq_lens[request]), inputs.kv_cache.shape[1]
    pages = inputs.block_table[request, : -(-length // page)]
    return inputs.kv_cache[pages].reshape(-1, 576)[:length]


def true_q(inputs: DcpDecodeInputs) -> np.ndarray:
    """The queries that the stored ones stand for."""
    return inputs.q.astype(np.float64) * (inputs.q_scale or 1)


def visible_counts(inputs: DcpDecodeInputs, request: int) -> list[int]:
    """How many of a request's keys on this rank each of its tokens sees, counted one by one."""
    start, end = inputs.query_start_loc[request : request + 2]
    total, world, run = int(inputs.total_lens[request]), inputs.dcp_world, inputs.interleave
    held = [g for g in range(total) if g // run % world == inputs.dcp_rank]
    later = [end - 1 - t if inputs.causal else 0 for t in range(start, end)]
    return [sum(g < total - after for g in held) for after in later]


@pytest.mark.parametrize(
    ("words", "digest"),
    [
        ("lens=301+97,q=8+1,h=3,world=2,rank=1,stale=1", "82b3a10e629234b0"),
        (
            "lens=40+3,q=2+4,h=2,world=2,rank=all,kv=e4m3,pad_rows=2,max_q=5,seed=9",
            "8543cddd9e948c61",
        ),
        ("lens=200,q=5,h=5,page=128,interleave=64,data=exact,seed=3", "a01900d43f31ef11"),
        ("lens=77,q=2,h=2,data=flat,causal=0,sm_scale=0.5", "d5d7086c8bfa34f1"),
        (
            "lens=60,q=3,h=2,world=2,kv=e4m3,q_dtype=e4m3,data=peaked,pad_rows=1,seed=4",
            "d6469daa501564c9",
        ),
    ],
)
def test_the_bytes_of_a_case_never_change(words: str, digest: str) -> None:
    assert inputs_of(words).sha256().startswith(digest)


def test_blocks_don_t_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "lens=301+97,q=8+1,h=3,world=2,data=exact"
    whole = inputs_of(words).sha256()
    monkeypatch.setattr("compare.generate.blocks.BLOCK_WORDS", 2000)
    assert inputs_of(words).sha256() == whole


def test_every_rank_holds_its_own_keys_of_one_request() -> None:
    inputs = inputs_of(f"{BATCH},rank=all")
    assert inputs.dcp_world == 1 and inputs.shards is not None and len(inputs.shards) == 4
    assert inputs.seq_lens.tolist() == inputs.total_lens.tolist() == [301, 97, 5]
    for request, total in enumerate((301, 97, 5)):
        whole = keys_of(inputs, request)
        assert len(whole) == total
        for shard in inputs.shards:
            held = [g for g in range(total) if g // 4 % 4 == shard.dcp_rank]
            assert keys_of(shard, request).tobytes() == whole[held].tobytes()


def test_a_request_has_the_same_keys_whatever_the_group_is() -> None:
    alone = keys_of(inputs_of("lens=90,q=2,h=3"), 0)
    for group in ("world=2", "world=8,interleave=64", "world=2,interleave=4,page=32,stale=1"):
        inputs = inputs_of(f"lens=90,q=2,h=3,{group}")
        run, world = inputs.interleave, inputs.dcp_world
        held = [g for g in range(90) if g // run % world == 0]
        assert keys_of(inputs, 0).tobytes() == alone[held].tobytes()


def test_one_rank_is_the_shard_of_all() -> None:
    shards = inputs_of(f"{BATCH},rank=all").shards
    assert shards is not None
    for rank in range(4):
        assert inputs_of(f"{BATCH},rank={rank}").sha256() == shards[rank].sha256()


def test_the_block_table_is_the_same_on_every_rank() -> None:
    shards = inputs_of(f"{BATCH},rank=all").shards
    assert shards is not None
    assert len({shard.block_table.tobytes() for shard in shards}) == 1


@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
def test_slots_past_a_length_and_pages_of_nobody_are_nan(kv: str) -> None:
    inputs = inputs_of(f"{BATCH},rank=1,kv={kv}")
    used = np.zeros(inputs.kv_cache.shape[:2], bool)
    page = inputs.kv_cache.shape[1]
    for request, length in enumerate(inputs.seq_lens):
        local = np.arange(length)
        used[inputs.block_table[request, local // page], local % page] = True
    nan = np.isnan(inputs.kv_cache.astype(np.float32))
    assert not nan[used].any() and nan[~used].all()
    assert used.any() and (~used).any() and (~used).all(axis=1).sum() >= 2


def test_stale_entries_name_no_page_or_a_page_of_somebody() -> None:
    inputs = inputs_of("lens=301+97+2,q=8+1+1,h=2,world=2,rank=1,interleave=64,stale=1")
    used = -(-inputs.seq_lens // 64)
    assert used.tolist() == [2, 1, 0]
    stale = inputs.block_table[np.arange(inputs.block_table.shape[1]) >= used[:, None]]
    pages = len(inputs.kv_cache)
    outside = (stale < 0) | (stale >= pages)
    assert outside.any() and (~outside).any()
    for request in (0, 1):
        kept = inputs.block_table[request, : used[request]]
        assert ((kept >= 0) & (kept < pages)).all()


def test_padded_rows_are_nan_and_no_other() -> None:
    inputs = inputs_of("lens=30+40,q=2+1,h=2,pad_rows=3")
    nan = np.isnan(inputs.q.astype(np.float32)).all(axis=(1, 2))
    assert nan.tolist() == [False] * 3 + [True] * 3
    assert inputs.query_start_loc.tolist() == [0, 2, 3]


def test_the_promised_bound_is_the_batch_s_maximum_or_what_the_case_says() -> None:
    assert inputs_of("lens=30+40,q=2+1").max_query_len == 2
    assert inputs_of("lens=30+40,q=2+1,max_q=8").max_query_len == 8
    assert inputs_of("lens=0,q=0").max_query_len == 1


def test_flat_scores_spread_less_than_a_fifth() -> None:
    for dtypes in ("kv=bf16", "kv=e4m3", "kv=e4m3,q_dtype=e4m3"):
        inputs = inputs_of(f"lens=2000,q=3,h=4,data=flat,{dtypes}")
        keys = keys_of(inputs, 0).astype(np.float64) * (inputs.kv_scale or 1)
        scores = true_q(inputs) @ keys.T * inputs.sm_scale
        assert 0 < (scores.max(axis=-1) - scores.min(axis=-1)).max() <= 0.2


def test_float8_keys_lie_near_those_of_bfloat16() -> None:
    bf16, e4m3 = (keys_of(inputs_of(f"lens=200,q=1,kv={kv}"), 0) for kv in ("bf16", "e4m3"))
    assert e4m3.dtype == ml_dtypes.float8_e4m3fn
    true, stored = bf16.astype(np.float64), e4m3.astype(np.float64)
    scale = 3 / 256
    assert inputs_of("lens=200,q=1,kv=e4m3").kv_scale == scale
    assert inputs_of("lens=200,q=1").kv_scale is None
    assert np.abs(stored).max() <= 448 and np.isfinite(stored).all()
    assert np.abs(stored * scale - true).max() <= 2.0**-4 * np.abs(true).max() * 1.01


@pytest.mark.parametrize("data", ["normal", "flat", "peaked"])
def test_float8_queries_lie_near_those_of_bfloat16(data: str) -> None:
    words = f"lens=200,q=3,h=2,kv=e4m3,data={data}"
    bf16, e4m3 = inputs_of(words), inputs_of(f"{words},q_dtype=e4m3")
    assert e4m3.q.dtype == ml_dtypes.float8_e4m3fn and bf16.q_scale is None
    assert e4m3.kv_cache.tobytes() == bf16.kv_cache.tobytes()
    stored, true = e4m3.q.astype(np.float64), true_q(bf16)
    assert 200 < np.abs(stored).max() <= 448  # the scale goes with the data
    assert np.abs(true_q(e4m3) - true).max() <= 2.0**-4 * np.abs(true).max() * 1.01


def test_padded_float8_queries_are_nan() -> None:
    inputs = inputs_of("lens=30+40,q=2+1,h=2,kv=e4m3,q_dtype=e4m3,pad_rows=3")
    nan = np.isnan(true_q(inputs)).all(axis=(1, 2))
    assert nan.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    "words",
    [
        "lens=301+97,q=8+1,h=6,world=2",
        "lens=301+97,q=8+1,h=6,world=4,stale=1",
        "lens=140,q=5,h=9,world=8,interleave=4,causal=0",
        "lens=600+197,q=8+5,h=5,world=2,interleave=64",
        "lens=16+3,q=16+1,h=5,world=1",
        "lens=64+128,q=1+1,h=1,world=2,kv=e4m3",
        "lens=301+97,q=8+1,h=6,world=2,kv=e4m3,q_dtype=e4m3",
        "lens=301,q=3,h=4,kv=e4m3,q_dtype=e4m3,sm_scale=1e-05",
    ],
)
def test_exact_rows_see_a_power_of_two_of_keys_at_score_zero_on_every_rank(words: str) -> None:
    inputs = inputs_of(f"{words},rank=all,data=exact")
    assert inputs.shards is not None
    for call in (inputs, *inputs.shards):
        for request in range(len(inputs.seq_lens)):
            keys = keys_of(call, request).astype(np.float64) * (call.kv_scale or 1)
            assert np.abs(keys[:, :512]).max(initial=0) <= 8
            assert (keys[:, :512] == np.round(keys[:, :512])).all()
            first = int(call.query_start_loc[request])
            for token, count in enumerate(visible_counts(call, request)):
                scores = true_q(call)[first + token] @ keys.T * call.sm_scale
                assert ((scores == 0) | (scores <= -1000)).all()
                matched = (scores[:, :count] == 0).sum(axis=1)
                assert (matched > 0).all() and ((matched & (matched - 1)) == 0).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exact_row_shows_one_key_too_many_or_too_few(rank: int) -> None:
    inputs = inputs_of(f"lens=301,q=8,h=16,world=2,rank={rank},data=exact")
    keys = keys_of(inputs, 0).astype(np.float64)
    for token, count in enumerate(visible_counts(inputs, 0)):
        zero = inputs.q[token].astype(np.float64) @ keys.T == 0
        assert zero[:, count - 1].any()
        if count < len(keys):
            assert zero[:, count].any()
    # And of the keys at the start, every one is in the set of some head.
    assert (inputs.q[0].astype(np.float64) @ keys.T == 0)[:, :count].any(axis=0).all()


def test_a_batch_without_requests_or_tokens_is_one_too() -> None:
    inputs = inputs_of("lens=none,q=none,h=2,pad_rows=3")
    assert inputs.q.shape == (3, 2, 576) and inputs.block_table.shape == (0, 1)
    assert inputs.query_start_loc.tolist() == [0]
    inputs = inputs_of("lens=0+0,q=0+0,h=2,stale=1")
    assert inputs.q.shape == (0, 2, 576) and inputs.seq_lens.tolist() == [0, 0]


def test_dtypes_are_the_contract_s() -> None:
    inputs = inputs_of(f"{BATCH},rank=2")
    assert inputs.q.dtype == inputs.kv_cache.dtype == ml_dtypes.bfloat16
    for name in ("block_table", "seq_lens", "query_start_loc", "total_lens"):
        assert getattr(inputs, name).dtype == np.int32


def test_a_rank_s_block_table_is_as_wide_as_its_part_of_the_longest_request() -> None:
    """vllm-project/vllm#50825: 1,000 positions are 8 blocks of 64 * 2, not 16 of 64."""
    inputs = inputs_of("lens=1000+3,q=1+1,h=1,world=2,rank=all")
    assert inputs.shards is not None
    assert [shard.block_table.shape for shard in inputs.shards] == [(2, 8)] * 2
    assert inputs.block_table.shape == (2, 16)


def test_a_nan_in_q_is_one_element() -> None:
    words = "lens=97+40,q=4+3,h=5,world=2,rank=1"
    plain, poisoned = inputs_of(words), inputs_of(f"{words},nan=q")
    bad = np.isnan(poisoned.q.astype(np.float32))
    assert [tuple(at[:2]) for at in np.argwhere(bad)] == [(3, 2)]
    assert np.array_equal(plain.q[~bad], poisoned.q[~bad])
    assert np.array_equal(plain.kv_cache, poisoned.kv_cache, equal_nan=True)


@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
def test_a_nan_in_a_key_is_in_the_first_of_the_rank_that_runs(kv: str) -> None:
    made = inputs_of(f"lens=97+40+3,q=2+3+1,h=2,world=4,rank=1,interleave=4,kv={kv},nan=key")
    bad = [np.isnan(keys_of(made, request).astype(np.float32)).sum(1) for request in range(3)]
    assert [list(np.flatnonzero(b)) for b in bad] == [[], [0], []]  # request 2 has none on rank 1
    merged = inputs_of(f"lens=97+40,q=2+3,h=2,world=4,rank=all,kv={kv},nan=key")
    assert merged.shards is not None
    per_rank = [np.isnan(keys_of(s, 1).astype(np.float32)).sum() for s in merged.shards]
    assert per_rank == [1, 0, 0, 0]
    assert np.isnan(keys_of(merged, 1)[0].astype(np.float32)).sum() == 1


def test_missing_keys_are_those_at_the_end_of_a_share() -> None:
    words = "lens=97+3,q=2+1,h=2,world=2,rank=1"
    whole, short = inputs_of(words), inputs_of(f"{words},missing=3")
    assert list(whole.seq_lens) == [48, 1]
    assert list(short.seq_lens) == [45, 0]
    assert np.array_equal(keys_of(short, 0), keys_of(whole, 0)[:45])
    missing = short.kv_cache[short.block_table[0, 0]][45:48]
    assert np.isnan(missing.astype(np.float32)).all()


def test_a_scale_of_ones_own_stores_the_same_keys_otherwise() -> None:
    words = "lens=97,q=2,h=2,kv=e4m3"
    made, usual = inputs_of(f"{words},kv_scale=0.0131"), inputs_of(words)
    assert made.kv_scale == 0.0131
    true = keys_of(usual, 0).astype(np.float64) * (usual.kv_scale or 1)
    found = keys_of(made, 0).astype(np.float64) * made.kv_scale
    assert np.abs(found - true).max() < np.abs(true).max() / 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lens=97,q=2,kv_scale=0.5", "only kv=e4m3 has a scale"),
        ("lens=97,q=2,kv=e4m3,kv_scale=0.001", "a finite number from 0.00892857 to 1"),
        ("lens=97,q=2,world=2,rank=all,missing=1", "accepted is one rank"),
        ("lens=97,q=0,nan=q", "without a query token"),
        ("lens=1,q=1,world=2,rank=1,nan=key", "no request with tokens has a key on the rank"),
        ("lens=97,q=2,data=exact,nan=q", "data=exact takes no nan, which is q here"),
        ("lens=97,q=2,data=exact,missing=1", "data=exact takes no missing, which is 1 here"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(words: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        parse_case(f"dcp-decode:{words}")
