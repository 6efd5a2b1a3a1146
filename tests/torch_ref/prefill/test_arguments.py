"""Bad arguments: the message names the argument, what it was, and what is accepted."""

from __future__ import annotations

import math

import pytest
import torch

from torch_ref import sparse_prefill, sparse_prefill_oracle

BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("function", [sparse_prefill, sparse_prefill_oracle])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 576, dtype=BF16)}, r"q: shape \[3, 576\]; accepted is \[T, H, D\]"),
        ({"q": torch.zeros(3, 4, 576)}, r"q: dtype torch.float32; accepted is torch.bfloat16"),
        ({"q": [[1.0]]}, r"q: list; accepted is a torch tensor"),
        ({"q": torch.zeros(3, 129, 576, dtype=BF16)}, r"q: 129 heads; accepted are 1 to 128"),
        ({"q": torch.zeros(3, 0, 576, dtype=BF16)}, r"q: 0 heads"),
        ({"q": torch.zeros(3, 4, 192, dtype=BF16)}, r"q: width D = 192; accepted are 512 and 576"),
        ({"kv": torch.zeros(50, 512, dtype=BF16)}, r"kv: width 512; q's width is 576"),
        ({"kv": torch.zeros(50, 2, 576, dtype=BF16)}, r"kv: shape \[50, 2, 576\]; accepted"),
        ({"kv": torch.zeros(50, 576)}, r"kv: dtype torch.float32"),
        ({"indices": torch.zeros(3, 40, dtype=torch.int64)}, r"indices: dtype torch.int64"),
        ({"indices": torch.zeros(2, 40, dtype=torch.int32)}, r"indices: 2 rows; q has T = 3"),
        ({"indices": torch.zeros(40, dtype=torch.int32)}, r"indices: shape \[40\]"),
        ({"attn_sink": torch.zeros(5)}, r"attn_sink: shape \[5\]; accepted is \[H\] = \[4\]"),
        ({"attn_sink": torch.zeros(4, dtype=BF16)}, r"attn_sink: dtype torch.bfloat16"),
        ({"topk_length": torch.zeros(4, dtype=torch.int32)}, r"topk_length: shape \[4\]"),
        ({"topk_length": torch.zeros(3, dtype=torch.int64)}, r"topk_length: dtype torch.int64"),
        (
            {"topk_length": torch.tensor([1, -1, 2], dtype=torch.int32)},
            r"topk_length: -1 in row 1; accepted are 0 to K = 40",
        ),
        ({"topk_length": torch.tensor([1, 2, 41], dtype=torch.int32)}, r"topk_length: 41 in row 2"),
        ({"d_v": 256}, r"d_v: 256; accepted is 512 only"),
        ({"sm_scale": math.nan}, r"sm_scale: nan; accepted"),
        ({"sm_scale": -math.inf}, r"sm_scale: -inf; accepted"),
        ({"sm_scale": 1e39}, r"sm_scale: 1e\+39; accepted is a number that is finite in fp32"),
        ({"sm_scale": "auto"}, r"sm_scale: 'auto'; accepted is a finite number"),
        ({"sm_scale": True}, r"sm_scale: True"),
        ({"rows": [3]}, r"rows: 3; accepted are rows 0 to 2"),
        ({"rows": [-1]}, r"rows: -1; accepted are rows 0 to 2"),
        ({"rows": [0.5]}, r"rows: torch.float32"),
        ({"rows": "first"}, r"rows: 'first'; accepted is a list of token rows"),
        ({"d_v": torch.tensor([512, 512])}, r"d_v: tensor.*; accepted is 512 only"),
        ({"sm_scale": 10**400}, r"sm_scale: inf; accepted is a number that is finite in fp32"),
        (
            {"q": torch.zeros(3, 4, 576, dtype=BF16, requires_grad=True)},
            r"q: requires a gradient; accepted is one without",
        ),
        ({"kv": torch.zeros(50, 576, dtype=BF16).to_sparse()}, r"kv: layout torch.sparse_coo"),
    ],
)
def test_bad_arguments_are_named(make, function, changes, message):
    arguments = make.random().keywords() | changes
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**arguments)


def test_arguments_on_two_devices_are_named(make):
    call = make.random()
    with pytest.raises(ValueError, match=r"^kv: on meta; q is on cpu"):
        sparse_prefill(**call.but(kv=call.kv.to("meta")).keywords())
