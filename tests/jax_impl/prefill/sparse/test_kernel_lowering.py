"""The Hopper kernel as a program: that it lowers, fits, and is one for many calls."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.mosaic.scratch import SMEM_LIMIT, check_smem, smem_bytes
from jax_impl.prefill.sparse.kernel_sm90 import Config, attend, launch, seams_cuda
from jax_impl.prefill.sparse.kernel_sm90.problem import Problem


def lowered(d: int, heads: int, config: Config | None = None, topk: int = 640) -> str:
    tokens, rows = 256, 4096
    shapes = (
        jax.ShapeDtypeStruct((tokens, heads, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((tokens, topk), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.float32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def call(*arrays):
        return attend(*arrays, num_kv=rows, config=config)

    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("d", [512, 576])
def test_the_kernel_lowers_for_cuda_on_any_machine(d, heads):
    assert "mosaic_gpu" in lowered(d, heads)


def test_any_head_count_and_width_lower_through_padding():
    text = lowered(576, 7, topk=133)
    assert re.search(r"tensor<256x64x576xbf16>", text)
    assert re.search(r"tensor<256x256xi32>", text)


@pytest.mark.parametrize(
    "config",
    [
        Config(num_ctas=7),
        Config(gather_prefetch=""),
        Config(gather_prefetch="64B", row_prefetch=False),
        Config(growth_limit=0, consumer_registers=208, producer_registers=88),
    ],
    ids=str,
)
def test_every_tuning_lowers(config):
    assert "mosaic_gpu" in lowered(512, 128, config)


def test_the_scratch_memory_fits_and_is_counted():
    for d in (512, 576):
        problem = Problem(num_tokens=1, num_heads=64, d_qk=d, num_kv=1, topk=128)
        scratch = launch.scratch_types(problem, seams_cuda)
        used = smem_bytes(scratch)
        assert 200_000 < used <= SMEM_LIMIT
        check_smem(scratch, reserved=SMEM_LIMIT - used)
        with pytest.raises(ValueError, match=f"of shared memory of {SMEM_LIMIT}"):
            check_smem(scratch, reserved=SMEM_LIMIT - used + 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_ctas": 0}, "num_ctas must be at least 1; got 0"),
        ({"consumer_registers": 240}, "must not exceed 504 together; got 552"),
        ({"growth_limit": -1.0}, r"growth_limit must lie in \[0, 64\]; got -1"),
        ({"gather_prefetch": "1KB"}, "gather_prefetch must be .* got '1KB'"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Config(**wrong)


def test_the_number_of_thread_blocks_follows_the_device_and_the_work():
    class Device:
        core_count = 114

    assert Config.for_device(Device()).num_ctas == 114
    assert Config.for_device(object()).num_ctas == Config().num_ctas == 132
    problem = Problem(num_tokens=3, num_heads=128, d_qk=512, num_kv=1, topk=128)
    assert Config().ctas_for(problem) == 6
    assert Config(num_ctas=4).ctas_for(problem) == 4


def test_another_scale_sink_or_length_runs_the_same_program(monkeypatch):
    from jax_impl import sparse_prefill

    compiled = []
    build = launch.build

    def counting(*arguments):
        compiled.append(arguments)
        return build(*arguments)

    q = np.ones((1, 2, 512), jnp.bfloat16)
    kv = np.ones((11, 512), jnp.bfloat16)
    indices = np.zeros((1, 3), np.int32)
    call: dict[str, Any] = {"backend": "pallas-interpret"}
    # What the process's first interpreted call imports adds to what JAX tells programs apart by.
    sparse_prefill(q, kv[:7], indices, 0.1, **call)
    monkeypatch.setattr(launch, "build", counting)
    sparse_prefill(q, kv, indices, 0.1, **call)
    sparse_prefill(q, kv, indices, -0.2, **call)
    sparse_prefill(q, kv, indices, 0.1, attn_sink=np.zeros(2, np.float32), **call)
    sparse_prefill(q, kv, indices, 0.1, topk_length=np.ones(1, np.int32), **call)
    sparse_prefill(q[:, :1], kv, indices[:, :2], 0.1, **call)
    assert len(compiled) == 1
