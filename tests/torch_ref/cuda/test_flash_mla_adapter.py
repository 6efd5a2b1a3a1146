"""The FlashMLA adapter around fake builds: which one is found, what is padded, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from tests.torch_ref.v4.problems import v4_problem
from torch_ref import sparse_prefill, v4_prefill
from torch_ref.cuda import flash_mla_adapter as adapter
from torch_ref.prefill.inputs import check_inputs

SGL = """
__version__ = "1.0.0"
calls = []
def has_legacy():
    return {legacy}
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None,
                         use_legacy=False, return_log2_lse=None):
    from torch_ref import sparse_prefill
    calls.append(dict(q=q, kv=kv, indices=indices, sink=attn_sink, length=topk_length,
                      legacy=use_legacy))
    assert q.shape[1] in (64, 128) and indices.shape[2] % 128 == 0 and indices.shape[2] > 0
    assert kv.shape[1] == 1 and indices.shape[1] == 1
    if q.shape[0] == 0:
        raise RuntimeError("assertion res == CUDA_SUCCESS failed")
    r = sparse_prefill(q, kv, indices, sm_scale, attn_sink=attn_sink, topk_length=topk_length)
    return r.out, r.max_logits, r.lse
"""
DEEPSEEK = """
__version__ = "1.0.0+abc"
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    return "deepseek"
"""
OLD = "def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512): ..."
VENDORED = "vllm.third_party.flashmla.flash_mla_interface"


def sgl(legacy: bool = True) -> str:
    return SGL.replace("{legacy}", str(legacy))


def last_call() -> dict:
    import flash_mla  # type: ignore[import-not-found]

    return flash_mla.calls[-1]


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert adapter.unsupported_reason() == "FlashMLA needs a CUDA GPU and torch sees none"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_architectures_are_said(hopper, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    reason = adapter.unsupported_reason()
    assert reason is not None and f"this GPU has {capability[0]}.{capability[1]}" in reason


def test_no_build_names_what_was_tried(hopper, install):
    install("flash_mla", OLD)
    install(VENDORED, "raise ImportError('libcudart.so.13')")
    assert adapter.find_build() is None
    reason = adapter.unsupported_reason()
    assert reason == (
        "no FlashMLA build is importable: flash_mla is too old: no attn_sink and topk_length; "
        f"{VENDORED} doesn't import (ImportError: libcudart.so.13)"
    )


def test_an_empty_placeholder_is_no_build(hopper, install):
    install("flash_mla", "")
    reason = adapter.unsupported_reason()
    assert reason is not None and "flash_mla has no flash_mla_sparse_fwd" in reason


@pytest.mark.parametrize(
    ("module", "source", "name", "takes_use_legacy"),
    [
        ("flash_mla", sgl(), "sgl-flash-mla", True),
        ("flash_mla", DEEPSEEK, "deepseek-ai FlashMLA", False),
        (VENDORED, DEEPSEEK, "vllm (vendored FlashMLA)", False),
    ],
)
def test_builds_are_told_apart(install, module, source, name, takes_use_legacy):
    install(module, source)
    build = adapter.find_build()
    assert build is not None
    assert (build.name, build.takes_use_legacy) == (name, takes_use_legacy)
    assert build.version.startswith("1.0.0")


def test_legacy_kernels_are_asked_for_where_they_are_needed(hopper, install, monkeypatch):
    install("flash_mla", sgl(legacy=False))
    reason = adapter.unsupported_reason(d_qk=512)
    assert reason is not None and "built without its legacy kernels" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (10, 0))
    assert adapter.unsupported_reason(d_qk=512) is None
    assert adapter.unsupported_reason(d_qk=576) is not None


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"s_q": 0}, "s_q = 0: flash_mla_sparse_fwd can't encode a TMA descriptor"),
        ({"s_kv": 0}, "s_kv = 0:"),
        ({"sm_scale": 0.0}, "sm_scale = 0.0: the kernel multiplies its -inf mask"),
        ({"sm_scale": -1.0}, "sm_scale = -1.0:"),
        ({"heads": 129}, "heads = 129:"),
        ({"d_qk": 192}, "d_qk = 192:"),
    ],
)
def test_calls_that_no_build_serves_are_refused(hopper, install, call, reason):
    install("flash_mla", sgl())
    got = adapter.unsupported_reason(**call)
    assert got is not None and got.startswith(reason)
    assert (
        adapter.unsupported_reason(s_q=1, s_kv=1, heads=3, d_qk=576, topk=0, sm_scale=0.1) is None
    )


@pytest.mark.parametrize(
    ("H", "K", "notes"),
    [
        (64, 128, []),
        (128, 256, []),
        (5, 133, ["heads padded from 5 to 64", "top-k width padded from 133 to 256"]),
        (65, 1, ["heads padded from 65 to 128", "top-k width padded from 1 to 128"]),
        (64, 0, ["top-k width padded from 0 to 128"]),
    ],
)
@pytest.mark.parametrize("with_options", [False, True])
def test_padding_is_told_and_changes_no_result(hopper, install, make, H, K, notes, with_options):
    install("flash_mla", sgl())
    call = make.random(T=2, H=H, D=512, K=max(K, 1))
    call = call.but(indices=call.indices[:, :K].contiguous(), topk_length=None)
    if with_options:
        call = call.but(topk_length=make.int32([K // 2, K]))
    else:
        call = call.but(attn_sink=None)
    result, said = adapter.sparse_prefill(**call.keywords())
    assert [note.split(" (")[0] for note in said] == notes
    want = sparse_prefill(**call.keywords())
    for name in ("out", "max_logits", "lse"):
        got = getattr(result, name)
        assert got.shape[:2] == (2, H)
        torch.testing.assert_close(got, getattr(want, name), rtol=2**-7, atol=1e-5)

    sent = last_call()
    assert sent["legacy"] is True
    assert not sent["q"][:, H:].any() and (sent["indices"][:, 0, K:] == -1).all()
    if with_options:
        assert (sent["sink"][H:] == -math.inf).all()
    else:
        assert sent["sink"] is None and sent["length"] is None


def test_deepseeks_build_is_not_given_use_legacy(hopper, install, make):
    install("flash_mla", DEEPSEEK.replace('"deepseek"', "q[..., :512], q[..., 0], q[..., 1]"))
    result, _ = adapter.sparse_prefill(**make.random().keywords())
    assert result.out.shape == (3, 4, 512)


def test_rows_that_start_between_16_byte_steps_are_copied_and_told(make):
    call = make.random(H=64, K=128, T=2)
    q = torch.zeros(2, 64, 577, dtype=torch.bfloat16)[..., :576].copy_(call.q)
    kv = torch.zeros(51, 576, dtype=torch.bfloat16).flatten()[3 : 3 + 50 * 576].reshape(50, 576)
    indices = torch.zeros(2, 256, dtype=torch.int32)[:, ::2].copy_(call.indices)
    strided = call.but(q=q, kv=kv.copy_(call.kv), indices=indices)
    padded, notes = adapter.pad_for_kernel(check_inputs(**strided.keywords(), d_v=512))
    assert [note.split(" copied")[0] for note in notes] == ["q", "kv", "indices"]
    for name in ("q", "kv", "indices"):
        assert torch.equal(getattr(padded, name), getattr(call, name))


def test_strides_that_the_kernel_takes_are_left_alone(make):
    call = make.random(H=64, K=128, T=2)
    q = torch.zeros(2, 70, 600, dtype=torch.bfloat16)[:, :64, :576].copy_(call.q)
    inputs = check_inputs(**call.but(q=q).keywords(), d_v=512)
    padded, notes = adapter.pad_for_kernel(inputs)
    assert notes == () and padded.q is q


def test_an_empty_query_is_refused_unless_insisted_on(hopper, install, make):
    install("flash_mla", sgl())
    call = make.random(T=0, H=64)
    with pytest.raises(ValueError, match=r"^s_q = 0: .*RuntimeError"):
        adapter.sparse_prefill(**call.keywords())
    with pytest.raises(RuntimeError, match="CUDA_SUCCESS"):
        adapter.sparse_prefill(**call.keywords(), allow_empty=True)
    assert adapter.unsupported_reason(s_q=0, allow_empty=True) is None


def test_bad_arguments_are_named_before_the_kernel_is_called(hopper, install, make):
    install("flash_mla", sgl())
    with pytest.raises(ValueError, match=r"^indices: dtype torch.int64"):
        adapter.sparse_prefill(**make.random().but(indices=torch.zeros(3, 4).long()).keywords())
    with pytest.raises(ValueError, match=r"^sm_scale = -0.5"):
        adapter.sparse_prefill(**make.random().but(sm_scale=-0.5).keywords())


def test_without_a_gpu_a_call_is_not_implemented(monkeypatch, make):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="needs a CUDA GPU"):
        adapter.sparse_prefill(**make.random().keywords())


def test_v4_prefill_gives_each_chunk_of_the_pipeline_to_the_kernel(hopper, install):
    install("flash_mla", sgl())
    problem = v4_problem([40, 0, 33, 300], [5, 0, 1, 20], ratio=4, heads=2)
    result, notes = adapter.v4_prefill(**problem.everything, keep_stages=True)
    want = v4_prefill(**problem.everything, keep_stages=True)
    torch.testing.assert_close(result.out, want.out, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(result.lse, want.lse, rtol=0, atol=2e-6)
    assert result.plan == want.plan and len(result.plan) > 1 and result.stages is not None
    assert last_call()["kv"].data_ptr() == result.stages[-1].workspace.data_ptr()
    assert torch.equal(last_call()["length"], result.stages[-1].lengths)
    assert notes == ("heads padded from 2 to 64 (zero queries, sink -inf)",)


def test_v4_prefill_sends_an_empty_chunk_as_the_engine_does(hopper, install):
    install("flash_mla", sgl())
    problem = v4_problem([40, 40], [0, 5], chunk_size=1, max_num_batched_tokens=16)
    with pytest.raises(RuntimeError, match="assertion"):
        adapter.v4_prefill(**problem.everything, rules="vllm-0.33.0")
    result, _ = adapter.v4_prefill(**problem.everything)
    assert [chunk.start for chunk in result.plan] == [1]
