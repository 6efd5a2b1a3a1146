"""Tensors in files: every bit and every dtype comes back, or a sentence says why not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compare.protocol.tensor_file import read_tensors, tensor_bytes, tensors_of


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_number_comes_back_bit_for_bit(tmp_path, dtype):
    numbers = np.arange(256, dtype=np.uint8).view(np.dtype(getattr(ml_dtypes, dtype)))
    path = tmp_path / "numbers.safetensors"
    held = {"numbers": numbers.reshape(4, 64), "lens": np.arange(3, dtype=np.int32)}
    path.write_bytes(tensor_bytes(held, {"who": "me"}))
    tensors, metadata = read_tensors(path)
    assert tensors.keys() == held.keys() and metadata == {"who": "me"}
    for name, array in held.items():
        assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def test_torchs_float8_is_read_as_it_is_written(tmp_path):
    numbers = torch.tensor([[1.5, -448.0, 0.0], [2.0**-9, float("nan"), 3.0]])
    path = tmp_path / "torch.safetensors"
    save_file({"a": numbers.to(torch.float8_e4m3fn), "b": numbers.bfloat16()}, path)
    tensors, _ = read_tensors(path)
    for array in tensors.values():
        np.testing.assert_array_equal(array.astype(np.float32), numbers.numpy())


def test_a_dtype_that_numpy_has_no_name_for_is_a_sentence(tmp_path):
    path = tmp_path / "scales.safetensors"
    save_file({"scales": torch.ones(3).to(torch.float8_e8m0fnu)}, path)
    with pytest.raises(ValueError, match="isn't a readable safetensors file"):
        read_tensors(path)


def test_a_file_s_content_is_read_without_a_file():
    held = {
        "bytes": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "rows": np.zeros((0, 4), np.int32),
    }
    tensors, metadata = tensors_of(tensor_bytes(held, {"who": "me"}))
    assert tensors.keys() == held.keys() and metadata == {"who": "me"}
    for name, array in held.items():
        assert tensors[name].dtype == array.dtype and tensors[name].shape == array.shape
        assert tensors[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tensors",
        (99).to_bytes(8, "little") + b"{}",
        tensor_bytes({"numbers": np.zeros(3, ml_dtypes.bfloat16)}, {}),
    ],
    ids=["nothing", "text", "cut head", "bfloat16"],
)
def test_content_that_holds_no_tensors_that_numpy_knows_is_a_sentence(content):
    with pytest.raises(ValueError, match="isn't a readable safetensors file"):
        tensors_of(content)
