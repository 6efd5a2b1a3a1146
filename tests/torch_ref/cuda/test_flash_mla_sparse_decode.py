"""FP8 sparse decode around a fake build: what it is given, what is made of its results."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.torch_ref.cuda.sparse_decode_cases import CASES, Call, answer, in_two_lists, make
from tests.torch_ref.v4.problems import answer as v4_answer
from tests.torch_ref.v4.problems import v4_problem
from torch_ref.cuda import flash_mla_sparse_decode as adapter
from torch_ref.cuda.flash_mla_sparse_decode import SlotList
from torch_ref.kv_cache import PagedKV, empty_cache
from torch_ref.v4.inputs import check_v4_inputs

SGL = """
import math
import torch
from torch_ref.kv_cache import PagedKV, read_kv
__version__ = "1.0.0"
calls = []
class Schedule:
    launches = 0
def has_legacy():
    return {legacy}
def get_mla_metadata(*args, **kwargs):
    return Schedule(), None
def keys_of(pages, slots, length):
    n, P, one, size = pages.shape
    assert one == 1 and size == 584 and pages.stride()[1:] == (584, 584, 1)
    assert pages.dtype == torch.uint8 and pages.stride(0) % 16 == pages.data_ptr() % 16 == 0
    stride = -(-P * 584 // 576) * 576
    cache = pages.as_strided((n, stride), (pages.stride(0), 1))
    listed = slots[:length]
    assert ((listed == -1) | ((listed >= 0) & (listed < n * P))).all()
    return read_kv(PagedKV(cache, P, "v4-fp8"), listed[listed >= 0])
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v,
                           tile_scheduler_metadata, num_splits=None, softmax_scale=None,
                           causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None,
                           extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None,
                           extra_topk_length=None, use_legacy=False, kv_format=None):
    calls.append(dict(q=q, indices=indices, length=topk_length, extra=extra_indices_in_kvcache,
                      extra_length=extra_topk_length, legacy=use_legacy, kv_format=kv_format))
    assert tile_scheduler_metadata.launches == 0
    tile_scheduler_metadata.launches += 1
    assert block_table is None and cache_seqlens is None and not causal and is_fp8_kvcache is True
    b, s, H, D = q.shape
    assert b > 0 and s == 1 and H in (64, 128) and D == head_dim_v == 512 and q.is_contiguous()
    for slots, length in ((indices, topk_length), (extra_indices_in_kvcache, extra_topk_length)):
        if slots is not None:
            assert slots.shape[:2] == (b, 1) and slots.shape[2] % 64 == 0 and slots.shape[2] > 0
            assert slots.is_contiguous() and slots.dtype == length.dtype == torch.int32
            assert length.shape == (b,)
    out, lse = torch.zeros(b, 1, H, 512), torch.full((b, H, 1), math.inf)
    for t in range(b):
        keys = keys_of(k_cache, indices[t, 0], int(topk_length[t]))
        if extra_k_cache is not None:
            more = keys_of(extra_k_cache, extra_indices_in_kvcache[t, 0], int(extra_topk_length[t]))
            keys = torch.cat([keys, more])
        if len(keys):
            z = q[t, 0].float() @ keys.float().T * softmax_scale
            sums = torch.logsumexp(z, -1)
            lse[t, :, 0] = sums.masked_fill(sums.isnan(), math.inf)
            total = sums if attn_sink is None else torch.logaddexp(sums, attn_sink)
            out[t, 0] = torch.exp(z - total[:, None]) @ keys.float()
    return out.bfloat16(), lse
"""
OLD = SGL.replace("get_mla_metadata(*args, **kwargs)", "get_mla_metadata(cache_seqlens, heads)")
TOO_OLD = "def flash_mla_with_kvcache(q, k_cache, indices=None, topk_length=None): ..."


def sgl(legacy: bool = True) -> str:
    return SGL.replace("{legacy}", str(legacy))


def calls() -> list[dict]:
    import flash_mla  # type: ignore[import-not-found]

    return flash_mla.calls


def assert_right(result, call: Call) -> None:
    out, lse = answer(call)
    torch.testing.assert_close(result.out.double(), out, rtol=2**-7, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_given_what_gives_the_answer(hopper, install, name):
    install("flash_mla", sgl())
    call = CASES[name]()
    result, _ = call.run(adapter)
    assert result.out.shape == call.q.shape and result.lse.shape == call.q.shape[:2]
    assert_right(result, call)
    assert calls()[-1]["legacy"] and calls()[-1]["kv_format"] == "V4"


def test_two_lists_share_one_softmax(hopper, install):
    install("flash_mla", sgl())
    call = make(holes=0.2)
    assert_right(in_two_lists(call, 64).run(adapter)[0], call)


def test_what_is_padded_is_told(hopper, install):
    install("flash_mla", sgl())
    _, notes = make(heads=3, K=100, extra_P=2, K2=3).run(adapter)
    assert notes == (
        "heads padded from 3 to 64 (zero queries, sink -inf)",
        "main list padded from 100 to 128 slots (-1)",
        "extra list padded from 3 to 64 slots (-1)",
    )
    assert make(heads=128).run(adapter)[1] == make(extra_P=2).run(adapter)[1] == ()


def test_many_tokens_go_in_several_launches_each_with_a_schedule_of_its_own(
    hopper, install, monkeypatch
):
    install("flash_mla", sgl())
    monkeypatch.setattr(adapter, "ROWS_PER_LAUNCH", 3)
    call = make(T=8, lengths=[1, 0, 5, 128, 7, 64, 65, 2], extra_P=2)
    result, notes = call.run(adapter)
    assert_right(result, call)
    assert [len(sent["q"]) for sent in calls()] == [3, 3, 2]
    assert [sent["length"].tolist() for sent in calls()] == [[1, 0, 5], [128, 7, 64], [65, 2]]
    assert notes == ("8 tokens in launches of at most 3",)


def test_no_token_is_no_launch(hopper, install):
    install("flash_mla", sgl())
    call = make()
    none = Call(call.q[:0], SlotList(call.main.cache, call.main.slots[:0]), None, None)
    result, notes = none.run(adapter)
    assert result.out.shape == (0, 64, 512) and result.lse.shape == (0, 64) and calls() == []
    assert notes == ("no query token: the kernel wasn't launched",)


def test_a_key_that_is_nan_is_not_an_empty_row(hopper, install):
    install("flash_mla", sgl())
    call = make(T=2, lengths=[4, 0])
    call.main.slots[0, 2] = 0  # slot 0 is poisoned
    result, notes = call.run(adapter)
    assert result.lse[0].isnan().all() and (result.lse[1] == -math.inf).all()
    assert notes == ("lse +inf read as NaN for 64 rows and heads whose out is NaN",)


def test_pages_apart_are_passed_on_and_unaligned_ones_copied(hopper, install):
    install("flash_mla", sgl())
    call = make(P=2, tokens=40, K=64)
    cache = call.main.cache.cache
    apart = PagedKV(cache.repeat_interleave(2, dim=0)[::2], 2, "v4-fp8")
    result, notes = replace(call, main=replace(call.main, cache=apart)).run(adapter)
    assert_right(result, call)
    assert notes == ()
    moved = torch.zeros(cache.numel() + 1, dtype=torch.uint8)[1:].view_as(cache).copy_(cache)
    shifted = PagedKV(moved, 2, "v4-fp8")
    result, notes = replace(call, main=replace(call.main, cache=shifted)).run(adapter)
    assert_right(result, call)
    assert notes == ("main cache copied: its pages didn't start at multiples of 16 bytes",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.full((4, 128), -2, dtype=torch.int32)}, "main slots: -2 in column 0 of"),
        ({"slots": torch.full((4, 128), 384, dtype=torch.int32)}, "main slots: 384 in column 0 of"),
        ({"slots": torch.zeros(3, 128, dtype=torch.int32)}, "main slots: shape [3, 128]; accepted"),
        ({"slots": torch.zeros(4, 128)}, "main slots: dtype torch.float32; accepted is torch.int"),
        ({"topk_length": torch.full((4,), 129, dtype=torch.int32)}, "main topk_length: 129 for t"),
        ({"topk_length": torch.full((4,), -1, dtype=torch.int32)}, "main topk_length: -1 for tok"),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, "main topk_length: shape [3]; acc"),
        ({"cache": empty_cache("v4-fp8", num_pages=0, page_size=2)}, "main cache: 0 pages"),
        (
            {"cache": empty_cache("bf16", num_pages=9, page_size=2)},
            "kv_format = 'bf16': FlashMLA's",
        ),
        ({"cache": empty_cache("v3.2-fp8", num_pages=9, page_size=2)}, "kv_format = 'v3.2-fp8': F"),
    ],
)
def test_what_the_kernel_would_trust_blindly_is_refused(hopper, install, changes, message):
    install("flash_mla", sgl())
    call = make()
    assert call.main.cache.num_slots == 384
    with pytest.raises(ValueError) as error:
        replace(call, main=replace(call.main, **changes)).run(adapter)
    assert str(error.value).startswith(message) and calls() == []


def test_other_misfits_are_refused(hopper, install):
    install("flash_mla", sgl())
    call = make()
    for changes, message in (
        ({"q": call.q.float()}, "q: dtype torch.float32"),
        ({"q": call.q[..., :448]}, r"q: shape \[4, 64, 448\]; accepted is \[T, H, 512\]"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink: shape \[3\]; accepted is \[H\] = \[64\]"),
        ({"sm_scale": 0.0}, "sm_scale = 0.0: the kernel multiplies its -inf mask"),
        ({"sm_scale": math.nan}, "sm_scale: nan; accepted is"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            replace(call, **changes).run(adapter)


@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (2, 8), (4, 4), (4, 70), (128, 3)])
@pytest.mark.parametrize("heads", [2, 64])
def test_a_prefill_batch_goes_token_by_token(hopper, install, ratio, topk, heads):
    install("flash_mla", sgl())
    images = [[], [(36, 39)], [], [(2, 6)], [(281, 299)]]
    problem = v4_problem(
        [0, 40, 33, 9, 300],
        [0, 5, 0, 9, 20],
        ratio=ratio,
        topk=topk,
        heads=heads,
        offset=7,
        images=images,
        max_image=19,
    )
    result, notes = adapter.v4_prefill(check_v4_inputs(**problem.arguments))
    out, _, lse = v4_answer(problem)
    torch.testing.assert_close(result.out.double(), out, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(result.lse.double(), lse, rtol=0, atol=2e-6)
    assert result.max_logits is None and result.plan == () and result.stages is None
    sent = calls()[-1]
    assert sent["q"].shape == (34, 1, 64, 512) and sent["indices"].shape == (34, 1, 64)
    for t in range(34):
        entries, positions = problem.keys_of(t)
        assert int(sent["length"][t]) == len(positions)
        assert ratio == 1 or int(sent["extra_length"][t]) == len(entries)
    assert (sent["extra"] is None) == (ratio == 1)
    assert any(note.startswith("heads padded from 2 to 64") for note in notes) == (heads == 2)


def test_what_stands_behind_a_tokens_list_is_not_a_slot(hopper, install):
    install("flash_mla", sgl())
    problem = v4_problem([9], [9], ratio=4, topk=4)
    lists = problem.arguments["topk_indices"].clone()
    lists[lists == -1] = 1 << 28
    garbage = check_v4_inputs(**problem.but(topk_indices=lists).arguments)
    result, _ = adapter.v4_prefill(garbage)
    torch.testing.assert_close(result.out.double(), v4_answer(problem)[0], rtol=2**-7, atol=2**-8)
    # A batch whose tokens see no entry at all needs no compressed page either.
    early = v4_problem([3], [3], ratio=4, topk=4)
    adapter.v4_prefill(check_v4_inputs(**early.arguments))
    assert calls()[-1]["extra"] is None


def test_an_empty_batch_is_no_launch(hopper, install):
    install("flash_mla", sgl())
    result, _ = adapter.v4_prefill(check_v4_inputs(**v4_problem([30], [0]).arguments))
    assert result.out.shape == (0, 2, 512) and calls() == []


def test_bf16_caches_are_refused(hopper, install):
    install("flash_mla", sgl())
    problem = v4_problem([9], [9], kv_format="bf16")
    with pytest.raises(
        ValueError, match=r"^kv_format = 'bf16': FlashMLA's sparse decode reads fp8"
    ):
        adapter.v4_prefill(check_v4_inputs(**problem.arguments))
    reason = adapter.unsupported_reason(kv_format="bf16")
    assert reason is not None and reason.startswith("kv_format = 'bf16'")
    assert adapter.unsupported_reason(kv_format="v4-fp8", heads=2, sm_scale=0.1) is None
    reason = adapter.unsupported_reason(heads=129)
    assert reason is not None and reason.startswith("heads = 129")


def test_builds_without_the_hint_are_not_given_it(hopper, install):
    source = sgl().replace(", use_legacy=False, kv_format=None", "")
    install("flash_mla", source.replace("legacy=use_legacy, kv_format=kv_format", "legacy=0"))
    call = make(extra_P=2)
    assert_right(call.run(adapter)[0], call)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (sgl(legacy=False), "built without its legacy kernels, which alone read V4's pages"),
        (OLD.replace("{legacy}", "True"), "is too old: its get_mla_metadata wants lengths"),
        (TOO_OLD, "flash_mla is too old: no indices and attn_sink and topk_length and extra_k"),
        ("", "flash_mla has no flash_mla_with_kvcache"),
    ],
)
def test_builds_that_cannot_serve_are_named(hopper, install, source, reason):
    install("flash_mla", source)
    got = adapter.unsupported_reason()
    assert got is not None and reason in got
    with pytest.raises(NotImplementedError):
        make().run(adapter)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_other_architectures_are_said(hopper, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    reason = adapter.unsupported_reason()
    assert reason is not None and reason.endswith(f"this GPU has {capability[0]}.{capability[1]}")


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.unsupported_reason() == "FlashMLA needs a CUDA GPU and torch sees none"
