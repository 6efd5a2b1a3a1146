"""What the planner takes as a length or a setting, and how it refuses the rest."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.planning import (
    compressed_lens,
    gather_lens,
    max_workspace_area,
    plan_prefill_chunks,
)

SETTINGS: dict[str, Any] = dict(
    compress_ratio=4, window=8, max_model_len=64, max_num_batched_tokens=16, chunk_size=1
)


def refuses(argument, got):
    """An error that starts with the argument, then says what was got and what is accepted."""
    pattern = rf"^{re.escape(argument)}: .*{re.escape(got)}.*accepted: "
    return pytest.raises(ValueError, match=pattern)


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        lambda lens: [np.int32(n) for n in lens],
        lambda lens: np.array(lens, np.int32),
        lambda lens: np.array(lens, np.int64),
        lambda lens: np.array(lens, np.uint8),
        lambda lens: np.array(lens, np.int64).repeat(2)[::2],
        jnp.array,
    ],
    ids=["tuple", "numpy-scalars", "int32", "int64", "uint8", "strided", "jax"],
)
def test_any_integer_sequence_or_array_gives_the_same_plain_integers(kind):
    batch = [40, 40, 16, 64, 0], [0, 5, 0, 3, 0]
    plan = plan_prefill_chunks(*map(kind, batch), **SETTINGS)
    assert plan == plan_prefill_chunks(*batch, **SETTINGS)
    assert {type(getattr(c, name)) for c in plan for name in c.__slots__} == {int}


def test_numpy_settings_are_taken_as_integers():
    settings: dict[str, Any] = {name: np.int16(value) for name, value in SETTINGS.items()}
    batch = [40, 64], [5, 3]
    assert plan_prefill_chunks(*batch, **settings) == plan_prefill_chunks(*batch, **SETTINGS)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "argument", "got"),
    [
        ([8, 8], [1], "query_lens", "1 requests, seq_lens: 2"),
        ([8, -1], [1, 0], "seq_lens[1]", "-1"),
        ([8, 8], [-3, 1], "query_lens[0]", "-3"),
        (np.array([8, -1]), [1, 0], "seq_lens[1]", "-1"),
        ([8, 2], [1, 3], "query_lens[1]", "3 is more than seq_lens[1], 2"),
        ([8.0], [1], "seq_lens[0]", "8.0"),
        ([8], [True], "query_lens[0]", "True"),
        ([8], [np.True_], "query_lens[0]", "True"),
        ([8], ["1"], "query_lens[0]", "'1'"),
        ([8], [None], "query_lens[0]", "None"),
        ([[8]], [1], "seq_lens[0]", "[8]"),
        ("8", [1], "seq_lens", "<U1"),
        (8, [1], "seq_lens", "()"),
        (np.array([8.0]), [1], "seq_lens", "float64"),
        (np.array([]), [], "seq_lens", "float64"),
        (np.array([True]), [1], "seq_lens", "bool"),
        (np.array([[8]]), [1], "seq_lens", "(1, 1)"),
        ([8], np.array([1.0], np.float32), "query_lens", "float32"),
    ],
)
def test_lengths_that_are_no_lengths_are_refused(seq_lens, query_lens, argument, got):
    with refuses(argument, got):
        plan_prefill_chunks(seq_lens, query_lens, **SETTINGS)
    with refuses(argument, got):
        gather_lens(seq_lens, query_lens)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compress_ratio", -1),
        ("compress_ratio", 4.0),
        ("compress_ratio", None),
        ("window", 0),
        ("window", -128),
        ("max_model_len", 0),
        ("max_model_len", "64"),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 16.0),
        ("chunk_size", 0),
        ("chunk_size", True),
        ("has_compressed", 1),
    ],
)
def test_settings_out_of_range_are_refused_even_for_an_empty_batch(setting, value):
    settings = SETTINGS | {setting: value}
    with refuses(setting, repr(value)):
        plan_prefill_chunks([], [], **settings)
    with refuses(setting, repr(value)):
        max_workspace_area(**settings)


def test_ratio_zero_with_a_compressed_region_is_refused():
    with refuses("compress_ratio", "0 with has_compressed True"):
        compressed_lens([8], compress_ratio=0, has_compressed=True)


def test_compressed_lens_refuse_what_the_planner_refuses():
    with refuses("seq_lens[0]", "-8"):
        compressed_lens([-8], compress_ratio=4)
    with refuses("seq_lens", "float64"):
        compressed_lens(np.array([8.0]), compress_ratio=1)
