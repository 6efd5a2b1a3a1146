"""Blocks of host arrays on the device where the judge measures, each carried there once.

A block stays in its own dtype until it is there.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

_CPU_ELEMENTS = 1 << 18
_CUDA_ELEMENTS = 1 << 22


def block_elements(device: str | None) -> int:
    """Elements of out in one block: 2 MB in float64 on a CPU, which a processor cache holds; 32 MB
    on a GPU, where a thread's dozen of such temporaries take 400 MB of memory that the kernels
    under test, and other processes, use too.
    """
    return _CUDA_ELEMENTS if torch.device(device or "cpu").type == "cuda" else _CPU_ELEMENTS


def rows_at(
    array: Shaped[np.ndarray, "T ..."], tokens: Int64[np.ndarray, " n"]
) -> Shaped[np.ndarray, "n ..."]:
    """array[tokens]; of neighbours in ascending order a view, nothing is copied."""
    n = len(tokens)
    if n and tokens[-1] - tokens[0] == n - 1 and (np.diff(tokens) == 1).all():
        return array[tokens[0] : tokens[-1] + 1]
    return array[tokens]


def upload(array: Shaped[np.ndarray, "..."], device: str | None) -> Tensor:
    """The array as a tensor on the device, of any strides; bfloat16 stays bfloat16. On the CPU they
    share memory if they can: it isn't to be written to.
    """
    if array.dtype == ml_dtypes.bfloat16:
        return upload(array.view(np.int16), device).view(torch.bfloat16)
    if torch.device(device or "cpu").type != "cuda":
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    # From page-locked memory the copy runs beside the next block's; torch's allocator keeps the
    # pages, and gives them out again only after the copy has ended.
    staged = torch.empty(array.shape, dtype=dtype, pin_memory=True)
    np.copyto(staged.numpy(), array)
    return staged.to(device, non_blocking=True)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor as a NumPy array on the host; bfloat16 through ml_dtypes."""
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
