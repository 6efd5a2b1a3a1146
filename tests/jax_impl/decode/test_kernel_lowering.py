"""The Hopper kernel as a program: that it lowers, fits, and is one for many plans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import plan_decode
from jax_impl.decode.kernel_sm90 import Config, attend, launch, seams_cuda
from jax_impl.mosaic.scratch import SMEM_LIMIT, check_smem, smem_bytes
from tests.jax_impl.decode.test_kernel_body import problem


def lowered(
    heads: int, *, page_size: int = 64, dtype: Any = jnp.bfloat16, out_dtype: Any = jnp.bfloat16,
    config: Config | None = None, **options: Any,
) -> str:  # fmt: skip
    """For a batch of 4 requests of 2 tokens, or of whatever the options say."""
    plan = plan_decode(
        [0, 2, 4, 6, 8], [5000] * 4, [5000] * 4, max_query_len=2, heads=heads, **options
    )
    rows = plan.num_rows
    shapes = (
        jax.ShapeDtypeStruct((rows, heads, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((4 * 5120 // page_size, page_size, 576), dtype),
        jax.ShapeDtypeStruct((4, 5120 // page_size), jnp.int32),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan),
        *[jax.ShapeDtypeStruct((), jnp.float32)] * 2,
    )

    def call(*arrays):
        return attend(*arrays, out_dtype=out_dtype, config=config)

    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


# Every head count, page size and dtype of the cache once, one tile and two to a request.
@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "out_dtype"),
    [
        (128, 64, jnp.bfloat16, jnp.bfloat16),
        (64, 128, jnp.bfloat16, jnp.float32),
        (16, 32, jnp.bfloat16, jnp.bfloat16),
        (6, 64, jnp.float8_e4m3fn, jnp.bfloat16),
        (96, 32, jnp.float8_e4m3fn, jnp.float32),
        (1, 128, jnp.float8_e4m3fn, jnp.bfloat16),
    ],
)
def test_the_kernel_lowers_for_cuda_on_any_machine(heads, page_size, dtype, out_dtype):
    text = lowered(heads, page_size=page_size, dtype=dtype, out_dtype=out_dtype)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # the second one merges


def test_a_plan_that_splits_nothing_lowers_to_one_launch():
    text = lowered(64, split_keys=128 * 40)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    "config",
    [
        Config(scores_behind_values=True),
        Config(growth_limit=0, consumer_registers=216, producer_registers=72),
    ],
    ids=str,
)
def test_every_tuning_lowers(config):
    assert "mosaic_gpu" in lowered(16, config=config)


@pytest.mark.parametrize(
    "changes", [{}, {"cluster": 2}, {"widened": True}, {"page_size": 32}], ids=str
)
def test_the_scratch_memory_fits_and_is_counted(changes):
    scratch = launch.scratch_types(problem(**changes), seams_cuda)
    used = smem_bytes(scratch)
    assert 220_000 < used <= SMEM_LIMIT
    check_smem(scratch, reserved=SMEM_LIMIT - used)
    with pytest.raises(ValueError, match=f"of shared memory of {SMEM_LIMIT}"):
        check_smem(scratch, reserved=SMEM_LIMIT - used + 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"consumer_registers": 240, "producer_registers": 72}, "must not exceed 504.*got 552"),
        ({"consumer_registers": 200}, "must be given together"),
        ({"growth_limit": -1.0}, r"growth_limit must lie in \[0, 64\]; got -1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Config(**wrong)


def test_a_producer_that_widens_gets_more_registers():
    assert Config().registers_for(widened=False) == (232, 40)
    assert Config().registers_for(widened=True) == (208, 88)


def test_small_scales_reach_the_kernel_as_they_are():
    """Only what would make 0 times -inf is replaced: 0, and what is taken for 0."""
    assert np.finfo(np.float32).tiny == launch._SMALLEST_SCALE
