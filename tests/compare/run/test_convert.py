from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from compare.protocol.arrays import to_jax, to_numpy, to_torch

BF16 = np.dtype(ml_dtypes.bfloat16)


def padded(dtype: np.dtype | type, gap: float) -> np.ndarray:
    """A [3, 2, 4] view of rows of 7."""
    buffer = np.full((3, 2, 7), gap, dtype)
    view = buffer[..., :4]
    view[...] = np.arange(24).reshape(3, 2, 4)
    return view


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.int32, ml_dtypes.float8_e4m3fn])
def test_a_strided_view_keeps_its_strides_and_what_lies_between(dtype: np.dtype | type) -> None:
    array = padded(dtype, 99)
    tensor = to_torch(array, copy=True)
    assert tensor.stride() == (14, 7, 1)
    assert tensor.float().tolist() == array.astype(np.float32).tolist()
    beside = tensor.as_strided((2, 2, 3), (14, 7, 1), 4).float()
    assert (beside == float(np.asarray(99).astype(dtype))).all()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_every_bit_pattern_survives_both_ways(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}")
    tensor = to_torch(bits.view(dtype))
    assert tensor.dtype is getattr(torch, name)
    assert to_numpy(tensor).dtype == dtype
    assert np.array_equal(to_numpy(tensor).view(bits.dtype), bits)


def test_a_copy_leaves_the_array_alone_and_sharing_does_not() -> None:
    array = np.zeros(4, np.float32)
    to_torch(array, copy=True).fill_(1)
    assert array.tolist() == [0, 0, 0, 0]
    to_torch(array).fill_(1)
    assert array.tolist() == [1, 1, 1, 1]


def test_a_read_only_array_is_copied_without_a_warning() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    to_torch(array).fill_(1)
    assert array.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), ()])
def test_arrays_without_elements_or_axes_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert to_torch(np.zeros(shape, BF16)).shape == shape


def test_a_reversed_view_becomes_dense() -> None:
    assert to_torch(np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]


def test_a_non_contiguous_bfloat16_tensor_comes_back_as_it_is() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T
    assert to_numpy(tensor).astype(np.float32).tolist() == tensor.float().tolist()


def test_results_are_not_cast() -> None:
    assert to_numpy(torch.zeros(2, dtype=torch.float64)).dtype == np.float64
    assert to_numpy(torch.zeros(2, dtype=torch.float16)).dtype == np.float16


def test_jax_arrays_keep_bfloat16_and_int64_is_refused() -> None:
    array = to_jax(padded(BF16, 99))
    assert to_numpy(array).dtype == BF16 and to_numpy(array)[2, 1].tolist() == [20, 21, 22, 23]
    with pytest.raises(ValueError, match="can't hold int64; it would make int32 of it"):
        to_jax(np.array([2**31 + 5]))


def test_what_is_no_array_is_named() -> None:
    with pytest.raises(TypeError, match=r"lse is a builtins\.list; accepted: a torch tensor"):
        to_numpy([1.0], "lse")


def test_a_tensor_without_plain_memory_is_named_and_not_taken_for_an_unsupported_case() -> None:
    for tensor, kind in (
        (torch.zeros(2, 2).to_sparse(), "torch.sparse_coo tensor"),
        (torch.zeros(2, 2, device="meta"), "tensor without data"),
    ):
        with pytest.raises(TypeError, match=f"out is a {kind}.*accepted: a dense tensor"):
            to_numpy(tensor, "out")
