"""What sparse prefill accepts, and what it says about the rest."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_impl import SparsePrefillResult, sparse_prefill, unsupported_reason
from tests.jax_impl.prefill.problems import HEADS, ROWS, TOKENS, TOPK, D, assert_same_bits, bf16


def good_arguments(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arguments = {
        "q": bf16(rng.standard_normal((TOKENS, HEADS, D))),
        "kv": bf16(rng.standard_normal((ROWS, D))),
        "indices": rng.integers(0, ROWS, (TOKENS, TOPK)).astype(np.int32),
        "sm_scale": 0.1,
        "attn_sink": np.zeros(HEADS, np.float32),
        "topk_length": np.full(TOKENS, 100, np.int32),
    }
    return arguments | changes


def zeros(*shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.zeros(shape, dtype)


BAD = [
    # (changed argument, its value, error, what the message says)
    ("q", zeros(HEADS, D), ValueError, r"q must be \[T, H, D\]; got shape \[3, 512\]"),
    ("q", zeros(TOKENS, HEADS, D, dtype=np.float32), ValueError, "q must be bfloat16; got float32"),
    ("q", [[[0.0]]], ValueError, "q must be a bfloat16 array .* got list"),
    ("q", zeros(TOKENS, 129, D), NotImplementedError, "1 to 128 heads; got 129"),
    ("q", zeros(TOKENS, 0, D), NotImplementedError, "1 to 128 heads; got 0"),
    ("q", zeros(TOKENS, HEADS, 640), NotImplementedError, "512 or 576; got 640"),
    ("q", torch.zeros(TOKENS, HEADS, D).bfloat16().to_sparse(), ValueError, "q must be dense"),
    ("q", torch.zeros(TOKENS, HEADS, D, device="meta").bfloat16(), ValueError, "q must be dense"),
    (
        "q",
        torch.zeros(TOKENS, HEADS, D).bfloat16().requires_grad_(),
        ValueError,
        "q must be without a gradient",
    ),
    (
        "q",
        jax.ShapeDtypeStruct((TOKENS, HEADS, D), jnp.bfloat16),
        ValueError,
        "got ShapeDtypeStruct",
    ),
    (
        "topk_length",
        np.ma.masked_array(zeros(TOKENS, dtype=np.int32), mask=True),
        ValueError,
        "topk_length must be an int32 array .* got MaskedArray",
    ),
    ("kv", zeros(ROWS, 2, D), ValueError, r"kv must be \[S, D\] or \[S, 1, D\]; got shape"),
    ("kv", zeros(ROWS, 576), ValueError, "kv must be as wide as q, D = 512; got 576"),
    ("kv", zeros(ROWS, D, dtype=np.float16), ValueError, "kv must be bfloat16; got float16"),
    ("indices", zeros(TOKENS, TOPK, dtype=np.int64), ValueError, "int32; got int64"),
    ("indices", zeros(TOKENS, TOPK, dtype=">i4"), ValueError, "got int32 of foreign byte order"),
    ("indices", [[0]], ValueError, "indices must be an int32 array .* got list"),
    ("indices", zeros(TOKENS, TOPK, dtype=np.uint32), ValueError, "int32; got uint32"),
    ("indices", zeros(TOKENS, 2, TOPK, dtype=np.int32), ValueError, r"\[T, K\] or \[T, 1, K\]"),
    ("indices", zeros(TOKENS - 1, TOPK, dtype=np.int32), ValueError, "4 tokens of q; got 3"),
    ("indices", zeros(TOKENS, 0, dtype=np.int32), ValueError, "at least one slot"),
    ("attn_sink", zeros(HEADS + 1, dtype=np.float32), ValueError, "3 heads of q; got 4"),
    ("attn_sink", zeros(HEADS, dtype=np.float64), ValueError, "float32; got float64"),
    ("attn_sink", zeros(1, HEADS, dtype=np.float32), ValueError, r"attn_sink must be \[H\]"),
    ("topk_length", zeros(TOKENS + 1, dtype=np.int32), ValueError, "4 tokens of q; got 5"),
    ("topk_length", zeros(TOKENS, dtype=np.int64), ValueError, "int32; got int64"),
    (
        "topk_length",
        np.asarray([9, -1, 9, 9], np.int32),
        ValueError,
        "K = 128; got -1 for token 1",
    ),
    (
        "topk_length",
        np.asarray([9, 9, 129, 9], np.int32),
        ValueError,
        "K = 128; got 129 for token 2",
    ),
    ("sm_scale", float("nan"), ValueError, "sm_scale must be finite"),
    ("sm_scale", float("inf"), ValueError, "sm_scale must be finite"),
    ("sm_scale", 1e39, ValueError, "sm_scale must be finite, also as a float32; got 1e"),
    ("sm_scale", "0.5", ValueError, "sm_scale must be a Python or NumPy number"),
    ("sm_scale", True, ValueError, "sm_scale must be a Python or NumPy number"),
    ("sm_scale", 10**400, ValueError, r"sm_scale must be finite.* got 10+\.\.\. \(401 digits\)"),
    ("validate", 1, ValueError, "validate must be True or False; got 1"),
    ("d_v", 256, NotImplementedError, "d_v must be 512; got 256"),
    ("d_v", np.asarray([512, 512]), NotImplementedError, "d_v must be 512; got array"),
    ("backend", "cuda", ValueError, "backend must be one of auto, xla, pallas, pallas-interpret"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), BAD, ids=[f"{row[0]}-{i}" for i, row in enumerate(BAD)]
)
def test_bad_input_is_refused_with_the_argument_what_it_was_and_what_is_accepted(
    name, value, error, message
):
    with pytest.raises(error, match=message):
        sparse_prefill(**good_arguments(**{name: value}))


def test_shapes_and_dtypes_are_checked_under_jit_too():
    indices = jax.ShapeDtypeStruct((TOKENS, TOPK), jnp.int16)
    arguments = good_arguments()
    call = jax.jit(lambda i: sparse_prefill(**(arguments | {"indices": i})))
    with pytest.raises(ValueError, match="indices must be int32; got int16"):
        call.trace(indices)


def test_a_traced_scale_is_refused():
    arguments = good_arguments()
    with pytest.raises(ValueError, match="known when the call is made"):
        jax.jit(lambda s: sparse_prefill(**(arguments | {"sm_scale": s})))(0.5)


def test_torch_int64_indices_are_refused_before_they_can_be_narrowed():
    indices = torch.full((TOKENS, TOPK), 2**31 + 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="indices must be int32; got int64"):
        sparse_prefill(**good_arguments(indices=indices))


def test_lengths_out_of_range_act_as_the_nearest_in_range_where_values_are_unknown(backend):
    arguments = good_arguments(backend=backend)
    inside: Any = np.asarray([0, 5, TOPK, TOPK], np.int32)
    outside: Any = np.asarray([-7, 5, TOPK + 1, 2**31 - 1], np.int32)
    expected = sparse_prefill(**(arguments | {"topk_length": inside}))

    def call(length: Any):
        return sparse_prefill(**(arguments | {"topk_length": length}))

    assert_same_bits(jax.jit(call)(outside), expected)
    unchecked = sparse_prefill(**(arguments | {"topk_length": outside}), validate=False)
    assert_same_bits(unchecked, expected)


def test_the_axis_of_the_single_kv_head_is_optional():
    arguments = good_arguments(backend="xla")
    expected = sparse_prefill(**arguments)
    with_axis = arguments | {
        "kv": arguments["kv"][:, None],
        "indices": arguments["indices"][:, None],
    }
    assert_same_bits(sparse_prefill(**with_axis), expected)


def test_jax_numpy_and_torch_arrays_strided_or_not_give_the_same_bits():
    arguments = good_arguments(backend="xla")
    expected = sparse_prefill(**arguments)
    jax_arrays: dict[str, Any] = {
        k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    assert_same_bits(sparse_prefill(**jax_arrays), expected)

    strided = {}
    for name in ("q", "kv", "indices"):
        array = arguments[name]
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 64), array.dtype)
        wide[..., : array.shape[-1]] = array
        strided[name] = wide[..., : array.shape[-1]]
    assert_same_bits(sparse_prefill(**(arguments | strided)), expected)

    def to_torch(array: np.ndarray) -> torch.Tensor:
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    for source in (arguments, arguments | strided):
        tensors: dict[str, Any] = {
            k: to_torch(v) if isinstance(v, np.ndarray) else v for k, v in source.items()
        }
        assert_same_bits(sparse_prefill(**tensors), expected)


def test_torch_tensors_may_be_written_to_as_soon_as_the_call_returns():
    # Large enough that a call which doesn't wait returns long before it has read them.
    rng = np.random.default_rng(0)
    kept = [
        torch.from_numpy(rng.standard_normal((64, 64, D))).bfloat16(),
        torch.from_numpy(rng.standard_normal((2000, D))).bfloat16(),
        torch.from_numpy(rng.integers(0, 2000, (64, 512)).astype(np.int32)),
    ]
    expected = sparse_prefill(*kept, 0.1, backend="xla")
    jax.block_until_ready(expected)
    given = [tensor.clone() for tensor in kept]
    result = sparse_prefill(*given, 0.1, backend="xla")
    for tensor in given:
        tensor.zero_()
    assert_same_bits(result, expected)


def test_no_tokens_give_empty_results_without_a_launch(monkeypatch):
    from jax_impl.prefill.sparse import api

    monkeypatch.setattr(api, "_attend", None)  # a launch would raise
    for backend in ("xla", "pallas-interpret"):
        result = sparse_prefill(
            zeros(0, 5, 576), zeros(ROWS, 576), zeros(0, TOPK, dtype=np.int32), 0.1, backend=backend
        )
        assert result.out.shape == (0, 5, 512)
        assert result.out.dtype == jnp.bfloat16
        assert result.max_logits.shape == result.lse.shape == (0, 5)


def test_the_result_is_a_named_pytree():
    result = sparse_prefill(**good_arguments(backend="xla"))
    assert isinstance(result, SparsePrefillResult)
    out, max_logits, lse = result
    assert (result.out, result.max_logits, result.lse) == (
        out,
        max_logits,
        lse,
    ) or out is result.out
    doubled = jax.tree.map(lambda x: x * 2, result)
    assert isinstance(doubled, SparsePrefillResult)


def test_pallas_says_in_a_sentence_why_it_cannot_run_here():
    class Blackwell:
        platform = "gpu"
        compute_capability = "10.0"
        device_kind = "NVIDIA B200"

    class Hopper(Blackwell):
        compute_capability = "9.0"
        device_kind = "NVIDIA H200"

    assert unsupported_reason("xla") is None
    assert unsupported_reason("pallas-interpret") is None
    assert unsupported_reason("pallas", Hopper()) is None
    assert unsupported_reason("pallas", Blackwell()) == (
        "pallas needs an NVIDIA Hopper GPU (compute capability 9.0); NVIDIA B200 has 10.0"
    )
    cpu = jax.devices("cpu")[0]
    assert unsupported_reason("pallas", cpu) == (
        "pallas needs an NVIDIA Hopper GPU; JAX runs on cpu here"
    )
    with pytest.raises(ValueError, match="backend must be one of"):
        unsupported_reason("triton")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there pallas may run")
def test_asking_for_pallas_without_a_hopper_gpu_is_an_error_and_auto_is_xla():
    with pytest.raises(NotImplementedError, match="backend='pallas': pallas needs"):
        sparse_prefill(**good_arguments(backend="pallas"))
    expected = sparse_prefill(**good_arguments(backend="xla"))
    assert_same_bits(sparse_prefill(**good_arguments(backend="auto")), expected)


def test_planning_can_be_used_without_starting_jax():
    code = "import jax_impl.planning, sys; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
