"""FlashMLA's dense decode around a fake build: what it is given, what is made of its results."""

from __future__ import annotations

import math

import pytest
import torch

from tests.torch_ref.decode.problems import Problem, int32, random_problem
from torch_ref import dcp_decode_oracle
from torch_ref.cuda import flash_mla_decode as adapter
from torch_ref.decode.inputs import check_decode_inputs

SGL = """
import math
import torch
from tests.torch_ref.cuda.fake_attention import attend
__version__ = "1.0.0"
calls = []
class Schedule:
    launches = 0
def has_legacy():
    return {legacy}
def get_mla_metadata(*args, **kwargs):
    return Schedule(), None
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                           tile_scheduler_metadata, num_splits=None, softmax_scale=None,
                           causal=False, is_fp8_kvcache=None, indices=None, use_legacy=False):
    calls.append(dict(q=q, block_table=block_table, lengths=cache_seqlens, causal=causal,
                      legacy=use_legacy, schedule=tile_scheduler_metadata))
    tile_scheduler_metadata.launches += 1
    assert k_cache.shape[1:] == (64, 1, 576) and is_fp8_kvcache is False and indices is None
    assert q.ndim == 4 and q.is_contiguous() and head_dim_v == 512 and len(q) > 0
    assert block_table.dtype == cache_seqlens.dtype == torch.int32 and block_table.shape[1] >= 1
    outs, lses = [], []
    for one, table, n in zip(q, block_table, cache_seqlens.tolist()):
        pages = table[: -(-n // 64)].long()
        out, lse = attend(one, k_cache[pages].reshape(-1, 576)[:n], softmax_scale, causal)
        outs.append(out.bfloat16())
        lses.append(lse.T)
    lse = torch.stack(lses)
    return torch.stack(outs), lse.masked_fill((lse == -math.inf) | lse.isnan(), math.inf)
"""
OLD = SGL.replace("get_mla_metadata(*args, **kwargs)", "get_mla_metadata(cache_seqlens, heads)")
TOO_OLD = "def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v): ..."


def sgl(legacy: bool = True) -> str:
    return SGL.replace("{legacy}", str(legacy))


def calls() -> list[dict]:
    import flash_mla  # type: ignore[import-not-found]

    return flash_mla.calls


def run(problem: Problem, *shard: int, flatten: bool = False):
    return adapter.dcp_decode(check_decode_inputs(**problem.shard(*shard)), flatten=flatten)


def assert_right(result, problem: Problem, *shard: int) -> None:
    want = dcp_decode_oracle(**problem.shard(*shard))
    torch.testing.assert_close(result.out.double(), want.out, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(result.lse.double(), want.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 64), (8, 4)])
def test_several_ranks_are_given_single_tokens_with_their_own_counts(
    hopper, install, world, interleave
):
    install("flash_mla", sgl())
    problem = random_problem([301, 97, 5], [8, 1, 7], heads=3, padding=2)
    for rank in range(world):
        result, notes = run(problem, rank, world, interleave)
        assert_right(result, problem, rank, world, interleave)
        sent = calls()[-1]
        assert sent["q"].shape == (16, 1, 3, 576) and not sent["causal"]
        counts = check_decode_inputs(**problem.shard(rank, world, interleave)).key_counts
        assert sent["lengths"].tolist() == list(counts[:16])
        assert torch.equal(sent["block_table"][0], sent["block_table"][7])
    assert notes == (
        "2 padded rows kept from the kernel; their out 0 and lse -inf are the adapter's",
        "flattened to 16 rows of one query token, each with its own key count",
    )


def test_several_ranks_go_flattened_even_where_one_holds_everything(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([64, 30], [4, 4])
    result, _ = run(problem, 0, 2, 64)
    assert_right(result, problem, 0, 2, 64)
    assert calls()[-1]["q"].shape[:2] == (8, 1) and not calls()[-1]["causal"]


def test_a_uniform_batch_of_one_rank_goes_as_it_stands(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([301, 97], [4, 4], heads=3)
    result, notes = run(problem)
    assert_right(result, problem)
    assert notes == () and calls()[-1]["q"].shape == (2, 4, 3, 576) and calls()[-1]["causal"]
    assert calls()[-1]["lengths"].tolist() == [301, 97]
    flattened, notes = run(problem, flatten=True)
    assert calls()[-1]["q"].shape == (8, 1, 3, 576) and notes[0].startswith("flattened to 8 rows")
    torch.testing.assert_close(flattened.out, result.out)


def test_idle_requests_are_left_out_and_do_not_make_a_batch_ragged(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([30, 7, 40, 0], [2, 0, 2, 0])
    result, notes = run(problem)
    assert_right(result, problem)
    assert notes == ("2 requests without query tokens left out",)
    assert calls()[-1]["lengths"].tolist() == [30, 40]


def test_a_ragged_batch_of_one_rank_is_flattened(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([301, 97], [8, 2])
    result, _ = run(problem)
    assert_right(result, problem)
    assert calls()[-1]["q"].shape[:2] == (10, 1)
    assert calls()[-1]["lengths"].tolist() == [*range(294, 302), 96, 97]


def test_a_draft_block_is_not_masked(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([30, 40], [3, 3]).but(causal=False)
    result, _ = run(problem)
    assert_right(result, problem)
    assert not calls()[-1]["causal"]
    result, _ = run(problem, 1, 2)
    assert_right(result, problem, 1, 2)


def test_lengths_below_the_total_are_not_left_to_the_kernels_triangle(hopper, install):
    install("flash_mla", sgl())
    shard = random_problem([30], [3]).shard()
    shard["total_lens"] = int32([31])
    result, _ = adapter.dcp_decode(check_decode_inputs(**shard))
    assert calls()[-1]["lengths"].tolist() == [29, 30, 30]
    torch.testing.assert_close(result.lse.double(), dcp_decode_oracle(**shard).lse)


def test_fewer_keys_than_tokens_give_empty_rows(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([1, 2], [4, 4])
    result, _ = run(problem)
    assert_right(result, problem)
    assert (result.lse[:3] == -math.inf).all()


def test_plus_infinity_is_an_empty_row_only_without_keys(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([40, 0], [1, 1])
    keys = [k.clone() for k in problem.keys]
    keys[0][3, 5] = math.nan
    result, notes = run(problem.but(keys=keys))
    assert result.lse[0].isnan().all() and (result.lse[1] == -math.inf).all()
    assert notes == ("lse +inf read as NaN for 2 rows and heads whose out is NaN",)


def test_plus_infinity_beside_a_finite_out_is_passed_on(hopper, install):
    install(
        "flash_mla",
        sgl().replace(
            "return torch.stack(outs), lse",
            "lse = lse + math.inf\n    return torch.stack(outs), lse",
        ),
    )
    result, notes = run(random_problem([40], [1]))
    assert (result.lse == math.inf).all() and notes == ()


def test_lse_changes_axes_and_is_not_reshaped():
    # vllm-project/vllm#46145
    lse = torch.tensor([[[0, 1], [10, 11], [20, 21]], [[100, 101], [110, 111], [120, 121]]])
    want = [[0, 10, 20], [1, 11, 21], [100, 110, 120], [101, 111, 121]]
    assert adapter.by_token(lse).tolist() == want


def test_one_schedule_serves_every_launch_of_a_prepared_call(hopper, install):
    install("flash_mla", sgl())
    inputs = check_decode_inputs(**random_problem([30], [2]).shard())
    prepared = adapter.prepare_decode(inputs)
    first, second = prepared.launch(), prepared.launch()
    assert torch.equal(first[0], second[0]) and calls()[-1]["schedule"].launches == 2
    adapter.dcp_decode(inputs)
    assert calls()[-1]["schedule"].launches == 1


def test_nothing_but_padding_is_no_launch(hopper, install):
    install("flash_mla", sgl())
    result, notes = run(random_problem([0], [0], padding=3))
    assert (result.out == 0).all() and (result.lse == -math.inf).all() and calls() == []
    assert result.out.shape == (3, 2, 512) and notes[-1].startswith("no query token")


def test_strided_inputs_are_copied_and_told(hopper, install):
    install("flash_mla", sgl())
    problem = random_problem([30], [2])
    shard = problem.shard()
    wide = torch.zeros(2, 2, 600).bfloat16()
    shard["q"] = wide[..., :576].copy_(shard["q"])
    result, notes = adapter.dcp_decode(check_decode_inputs(**shard))
    assert_right(result, problem)
    assert [note.split(":")[0] for note in notes] == ["q copied"]


def test_deepseeks_build_is_not_given_use_legacy(hopper, install):
    install("flash_mla", sgl().replace(", use_legacy=False", "").replace("use_legacy", "None"))
    problem = random_problem([30], [2])
    assert_right(run(problem)[0], problem)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"page_size": 32}, "page_size = 32: FlashMLA's dense decode takes pages of 64 keys"),
        ({"kv_dtype": torch.float8_e4m3fn}, "kv_cache of torch.float8_e4m3fn: "),
        ({"q_dtype": torch.float8_e4m3fn}, "q of torch.float8_e4m3fn: "),
        ({"sm_scale": 0.0}, "sm_scale = 0.0: the kernel multiplies its -inf mask"),
    ],
)
def test_calls_that_no_build_serves_are_refused(hopper, install, arguments, reason):
    install("flash_mla", sgl())
    got = adapter.unsupported_reason(**arguments)
    assert got is not None and got.startswith(reason)
    served = {"page_size": 64, "q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    assert adapter.unsupported_reason(**served, sm_scale=0.1) is None


def test_refusals_are_errors_of_the_call_too(hopper, install):
    install("flash_mla", sgl())
    with pytest.raises(ValueError, match=r"^page_size = 32"):
        adapter.dcp_decode(check_decode_inputs(**random_problem([9], [1]).shard(0, 1, 1, 32)))
    with pytest.raises(ValueError, match=r"^sm_scale = -1"):
        run(random_problem([9], [1]).but(sm_scale=-1.0))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (sgl(legacy=False), "built without its legacy kernels, of which dense decode is one"),
        (OLD.replace("{legacy}", "True"), "is too old: its get_mla_metadata wants lengths"),
        (TOO_OLD, "flash_mla is too old: no cache_seqlens and tile_scheduler_metadata"),
        ("", "flash_mla has no flash_mla_with_kvcache"),
    ],
)
def test_builds_that_cannot_serve_are_named(hopper, install, source, reason):
    install("flash_mla", source)
    got = adapter.unsupported_reason()
    assert got is not None and reason in got
    with pytest.raises(NotImplementedError):
        run(random_problem([9], [1]))


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_architectures_are_said(hopper, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    reason = adapter.unsupported_reason()
    assert reason is not None and reason.endswith(f"this GPU has {capability[0]}.{capability[1]}")


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.unsupported_reason() == "FlashMLA needs a CUDA GPU and torch sees none"
