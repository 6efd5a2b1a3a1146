"""How sparse prefill is timed."""

from __future__ import annotations

from typing import Any

from compare.houses.torch_backend import torch_device
from compare.judging.attention_call import SparsePrefillInputs
from compare.protocol.timing import Bench
from compare.suites.sparse_prefill.torch_adapter import torch_arguments

# FlashMLA's performance cases: s_q, s_kv, h, d, topk.
_SIX = (
    (4096, 8192, 128, 576, 2048),
    (4096, 65536, 128, 576, 2048),
    (4096, 65536, 64, 576, 2048),
    (4096, 65536, 128, 512, 640),
    (4096, 65536, 64, 512, 640),
    (1024, 8192, 128, 576, 2048),
)


def flop(inputs: SparsePrefillInputs) -> float:
    """2 T H K (D + 512), all slots counted."""
    T, H, D = inputs.q.shape
    return 2.0 * T * H * inputs.indices.shape[1] * (D + inputs.d_v)


def oracle(inputs: SparsePrefillInputs, tokens: Any, device: str) -> tuple[Any, Any]:
    """float64 out and lse of some tokens."""
    import torch_ref

    arguments, options = torch_arguments(inputs, torch_device(device))
    result = torch_ref.sparse_prefill_oracle(*arguments, **options, rows=tokens)
    return result.out, result.lse


BENCH = Bench(
    lines=tuple(
        f"sparse-prefill:s_q={s_q},s_kv={s_kv},h={h},d={d},topk={topk}"
        for s_q, s_kv, h, d, topk in _SIX
    ),
    against=("flash_mla",),
    flop=flop,
    oracle=oracle,
    config="jax_impl.prefill.sparse.kernel_sm90.config:Config",
)
