"""The oracle against loops in plain Python, its blocks, rows and devices; and the eager recipe."""

from __future__ import annotations

import math

import pytest
import torch

from torch_ref import sparse_prefill, sparse_prefill_oracle
from torch_ref.prefill import inputs as prefill_inputs


def brute_force(call):
    """The formula with math.fsum, one number at a time: out, max_logits, lse and p2."""
    q, kv = call.q.double().tolist(), call.kv.double().tolist()
    T, H = call.q.shape[:2]
    out, top, lse, spread = [], [], [], []
    for t in range(T):
        length = call.topk_length[t].item() if call.topk_length is not None else math.inf
        named = [i for j, i in enumerate(call.indices[t].tolist()) if j < length]
        keys = [kv[i] for i in named if 0 <= i < len(kv)]
        for h in range(H):
            if not keys:
                out.append([0.0] * 512)
                top.append(-math.inf)
                lse.append(math.inf)
                spread.append(0.0)
                continue
            z = [
                call.sm_scale * math.fsum(a * b for a, b in zip(q[t][h], k, strict=True))
                for k in keys
            ]
            m = max(z)
            p = [math.exp(x - m) for x in z]
            L = math.fsum(p)
            sink = 0.0 if call.attn_sink is None else math.exp(call.attn_sink[h].item() - m)
            w = [x / (L + sink) for x in p]
            out.append(
                [math.fsum(a * k[c] for a, k in zip(w, keys, strict=True)) for c in range(512)]
            )
            top.append(m)
            lse.append(m + math.log(L))
            spread.append(
                math.sqrt(
                    math.fsum(
                        a * a * math.fsum(x * x for x in k[:512])
                        for a, k in zip(w, keys, strict=True)
                    )
                )
            )
    as_tensor = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    return (
        as_tensor(out).reshape(T, H, 512),
        *(as_tensor(values).reshape(T, H) for values in (top, lse, spread)),
    )


@pytest.mark.parametrize("D", [512, 576])
@pytest.mark.parametrize("scale", [0.044, 0.5, 0.0, -0.3])
@pytest.mark.parametrize("with_sink", [False, True])
def test_oracle_equals_loops(make, D, scale, with_sink):
    call = make.random(D=D, H=2, S=15, K=12, seed=D).but(sm_scale=scale)
    call.indices[2] = -1
    if not with_sink:
        call = call.but(attn_sink=None)
    got = sparse_prefill_oracle(**call.keywords())
    for name, want in zip(("out", "max_logits", "lse", "p2"), brute_force(call), strict=True):
        assert getattr(got, name).dtype == torch.float64
        torch.testing.assert_close(getattr(got, name), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [sparse_prefill_oracle, sparse_prefill])
def test_blocks_of_rows_give_what_one_block_gives(make, monkeypatch, function):
    call = make.random(T=7)
    whole = function(**call.keywords())
    monkeypatch.setattr(prefill_inputs, "_KEY_BYTES_CPU", 600_000)  # two or three tokens a block
    parts = function(**call.keywords())
    for name in ("out", "max_logits", "lse"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [sparse_prefill_oracle, sparse_prefill])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rows_are_computed_alone_and_in_the_order_asked_for(make, function, as_tensor):
    call = make.random(T=5)
    whole = function(**call.keywords())
    rows = [3, 0, 3]
    chosen = function(**call.keywords(), rows=torch.tensor(rows) if as_tensor else rows)
    for name in ("out", "max_logits", "lse"):
        torch.testing.assert_close(
            getattr(chosen, name), getattr(whole, name)[rows], rtol=1e-6, atol=1e-6
        )
    assert function(**call.keywords(), rows=[]).out.shape == (0, 4, 512)


def test_a_block_never_outgrows_its_budget(make):
    call = make.random(T=40, H=128, K=512, S=100)
    inputs = prefill_inputs.check_inputs(**call.but(topk_length=None).keywords(), d_v=512)
    sizes = [
        block.keys.numel() * 8
        for block in prefill_inputs.blocks(inputs, torch.arange(40), torch.float64)
    ]
    assert len(sizes) > 1 and max(sizes) < 256 << 20


def test_eager_result_is_within_the_rounding_of_p(make):
    """Rounding each P once is a random walk of size p2 / 2^9; out's own rounding comes on top."""
    for seed in range(20):
        call = make.random(T=4, H=8, K=100, S=200, seed=seed)
        truth = sparse_prefill_oracle(**call.keywords())
        got = sparse_prefill(**call.keywords())
        assert got.out.dtype == torch.bfloat16 and got.lse.dtype == torch.float32
        error = (got.out.double() - truth.out).norm(dim=-1)
        assert (error <= 2**-8 * truth.p2 + 2**-9 * truth.out.norm(dim=-1)).all()
        torch.testing.assert_close(got.lse.double(), truth.lse, rtol=0, atol=4e-6)
        torch.testing.assert_close(got.max_logits.double(), truth.max_logits, rtol=0, atol=4e-6)


def test_eager_rounds_p_for_values_and_not_for_its_sum(make):
    call = make.key_logits([0.0, -1.0], [0.0, 1.0]).but(sm_scale=0.25)
    v = torch.linspace(1, 3, 511).bfloat16()
    call.kv[1, 1:] = v
    p = math.exp(-0.25)
    rounded = torch.tensor(p).bfloat16().double()
    want = (v.double() * rounded / (1 + p)).bfloat16()
    assert torch.equal(sparse_prefill(**call.keywords()).out[0, 0, 1:], want)
    for wrong in (v.double() * p / (1 + p), v.double() * rounded / (1 + rounded)):
        assert not torch.equal(wrong.bfloat16(), want)


def test_tf32_settings_are_overruled_and_put_back(make):
    call = make.random(K=64)
    want = sparse_prefill(**call.keywords())
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    seen = []
    original = torch.exp2
    try:
        matmul.fp32_precision = "tf32"
        torch.exp2 = lambda x: seen.append(matmul.fp32_precision) or original(x)
        got = sparse_prefill(**call.keywords())
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.exp2 = original
        matmul.fp32_precision = before
    assert set(seen) == {"ieee"}
    assert torch.equal(got.out, want.out)
