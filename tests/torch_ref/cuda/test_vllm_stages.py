"""The adapter around an engine's stages: a fake engine with the real one's names and arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_ref.v4.problems import int32
from torch_ref import indices, kv_cache
from torch_ref.cuda import vllm_stages
from torch_ref.cuda.vllm_stages import Stage

OPS = "vllm.models.deepseek_v4.common.ops.cache_utils"
METADATA = "vllm.v1.attention.ops.metadata"
VERSION = '__version__ = "0.33.0"\n'
ENGINE = """
import torch
from torch_ref import indices, kv_cache

def combine_topk_swa_indices(topk_indices, query_start_loc, seq_lens, gather_lens, window_size,
                             compress_ratio, topk, M, N, out=None{images}):
    assert topk_indices.shape[0] == query_start_loc[-1] - query_start_loc[0]
    return indices.combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, window=window_size,
        compress_ratio=compress_ratio, topk=topk, workspace_rows=M, compressed_rows=N{passed})

def compute_global_topk_indices_and_lens(topk_indices, token_to_req_indices, block_table,
                                         block_size, is_valid_token):
    return indices.global_topk_slots(topk_indices, token_to_req_indices, block_table,
                                     page_size=block_size, is_valid_token=is_valid_token)

def dequantize_and_gather_k_cache(out, k_cache, seq_lens, gather_lens, block_table, block_size,
                                  offset, use_fnuz=False):
    assert k_cache.shape[1:] == (block_size, 584) and k_cache.stride()[1:] == (584, 1)
    assert block_table.is_contiguous()
    stride = -(-block_size * 584 // 576) * 576
    cache = k_cache.as_strided((len(k_cache), stride), (k_cache.stride(0), 1))
    paged = kv_cache.PagedKV(cache, block_size, "v4-fp8")
    kv_cache.gather_kv(paged, block_table, seq_lens, out, gather_lens=gather_lens, offset=offset)

def quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size=64, is_ue8m0=True,
                                use_fnuz=False):
    assert slot_mapping.dtype == torch.int64
    paged = kv_cache.PagedKV(k_cache, block_size, "v4-fp8")
    k_cache.copy_(kv_cache.insert_kv(paged, k, slot_mapping).cache)
"""
MAPPING = """
from torch_ref import indices

def compute_token_to_req_indices(query_start_loc, out, num_mapped_tokens, num_tokens):
    assert query_start_loc[0] == 0
    out[:num_tokens] = indices.token_to_request(
        query_start_loc, num_tokens, num_mapped=num_mapped_tokens)
    return out[:num_tokens]
"""
IMAGES = ", left_visible=None, right_visible=None, max_image_tokens=0"
PASSED = """,
        image_left=left_visible, image_right=right_visible, max_image_tokens=max_image_tokens"""
STAGES: tuple[Stage, ...] = ("combine", "global_topk", "gather", "insert", "token_to_request")


def engine(images: bool = True) -> str:
    return ENGINE.replace("{images}", IMAGES if images else "").replace(
        "{passed}", PASSED if images else ""
    )


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_no_vllm_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for stage in STAGES:
        assert vllm_stages.unsupported_reason(stage) == "vllm isn't importable here"


def test_stages_are_given_their_arguments(install, hopper):
    install(OPS, engine(), VERSION)
    install(METADATA, MAPPING, VERSION)
    assert all(vllm_stages.unsupported_reason(stage) is None for stage in STAGES)

    topk, starts, seq = int32([[0, -1]] * 3 + [[0, 1]] * 2), int32([7, 10, 12]), int32([6, 21])
    left, right = int32([0, 1, 0, 0, 0]), int32([0, 0, 0, 1, 0])
    options: dict[str, Any] = {
        "window": 8,
        "compress_ratio": 4,
        "topk": 2,
        "workspace_rows": 14,
        "compressed_rows": 5,
    }
    images: dict[str, Any] = {"image_left": left, "image_right": right, "max_image_tokens": 3}
    given = (topk, starts, seq, int32([6, 9]))
    want = indices.combine_topk_swa_indices(*given, **options, **images)
    assert same(vllm_stages.combine_topk_swa_indices(*given, **options, **images), want)
    window_only: dict[str, Any] = {**options, "topk": 0, "compressed_rows": 0, "compress_ratio": 1}
    want = indices.combine_topk_swa_indices(None, *given[1:], **window_only)
    assert same(vllm_stages.combine_topk_swa_indices(None, *given[1:], **window_only), want)

    given = (topk, int32([0, 0, 0, 1, 1]), int32([[3], [2]]))
    want = indices.global_topk_slots(*given, page_size=2)
    assert same(vllm_stages.global_topk_slots(*given, page_size=2), want)
    valid = torch.tensor([True, False, True, True, False])
    _, lengths = vllm_stages.global_topk_slots(*given, page_size=2, is_valid_token=valid)
    assert lengths.tolist() == [1, 0, 1, 2, 0]

    values = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    empty = kv_cache.empty_cache("v4-fp8", num_pages=4, page_size=2, fill=0xA5)
    slots = int32([3, -1, 0, 1, 2, 4, 5, 7])
    filled = kv_cache.insert_kv(empty, values, slots)
    assert torch.equal(vllm_stages.insert_kv(empty, values, slots).cache, filled.cache)
    assert (empty.cache == 0xA5).all()
    table = int32([[9, 1, 0], [9, 2, 9]])[:, 1:]
    results = [
        gather(
            filled,
            table,
            int32([4, 2]),
            torch.zeros(2, 5, 512).bfloat16(),
            gather_lens=int32([3, 2]),
            offset=1,
        )
        for gather in (kv_cache.gather_kv, vllm_stages.gather_kv)
    ]
    assert torch.equal(*results) and results[0][0, 1:4].any()

    want = indices.token_to_request(int32([7, 9, 9, 10]), 6, num_mapped=5)
    got = vllm_stages.token_to_request(int32([7, 9, 9, 10]), 6, num_mapped=5)
    assert torch.equal(got, want) and got.tolist() == [0, 0, 2, 2, 2, 0]


def test_images_need_an_engine_that_knows_them(install, hopper):
    install(OPS, engine(images=False), VERSION)
    starts, seq = int32([0, 3]), int32([6])
    options: dict[str, Any] = {"window": 8, "compress_ratio": 1, "topk": 0, "workspace_rows": 6}
    given = (None, starts, seq, seq)
    vllm_stages.combine_topk_swa_indices(*given, **options, compressed_rows=0)
    with pytest.raises(NotImplementedError, match="knows no images"):
        vllm_stages.combine_topk_swa_indices(
            *given, **options, compressed_rows=0, max_image_tokens=3
        )


def test_without_a_gpu_only_the_interpreter_runs_them(install, monkeypatch):
    install(OPS, engine(), VERSION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = vllm_stages.unsupported_reason("combine")
    assert reason == "vLLM's stages are Triton kernels and torch sees no CUDA GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert vllm_stages.unsupported_reason("combine") is None


def test_other_formats_are_refused(install, hopper):
    install(OPS, engine(), VERSION)
    paged = kv_cache.empty_cache("bf16", num_pages=1, page_size=2)
    reason = "kv_format = 'bf16': vLLM's gather is for v4-fp8 pages"
    assert vllm_stages.unsupported_reason("gather", kv_format="bf16") == reason
    assert vllm_stages.unsupported_reason("gather", kv_format="v4-fp8") is None
    with pytest.raises(NotImplementedError, match=r"^kv_format = 'bf16'"):
        vllm_stages.gather_kv(paged, int32([[0]]), int32([1]), torch.zeros(1, 1, 512).bfloat16())
    with pytest.raises(NotImplementedError, match=r"^kv_format = 'bf16'"):
        vllm_stages.insert_kv(paged, torch.zeros(1, 512).bfloat16(), int32([0]))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, f"vLLM 0.33.0: {OPS} doesn't import (ModuleNotFoundError"),
        ("raise RuntimeError('no GPU')", "doesn't import (RuntimeError: no GPU)"),
        ("pass", "cache_utils has no combine_topk_swa_indices"),
        (
            engine().replace("window_size,", "window,").replace("window_size", "window"),
            "isn't as known: looked for window_size; can't fill window",
        ),
        (
            engine().replace("M, N, out=None", "M, N, layout, out=None"),
            "isn't as known: can't fill layout",
        ),
    ],
)
def test_a_stage_that_moved_or_changed_is_refused_by_name(install, hopper, source, reason):
    install(OPS if source else "vllm.other", source or "", VERSION)
    got = vllm_stages.unsupported_reason("combine")
    assert got is not None and reason in got
