"""How DCP decode is timed: whole batches on one GPU, and ragged ones on rank 0 of a group.

FlashMLA runs whole requests on one rank with one query length, else one row per token; that
flattened form, which is what DCP needs of it, is a reference of its own beside the whole one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from compare.generate.ownership import local_length
from compare.generate.streams import below
from compare.houses.torch_backend import torch_device
from compare.protocol.timing import Bench
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.dcp_decode.torch_adapter import decode_arguments

# Requests, query tokens of each, heads, keys of each.
_SEVEN = (
    (128, 1, 128, 4096),
    (128, 1, 16, 8192),
    (32, 1, 64, 16384),
    (32, 8, 16, 16384),
    (32, 8, 64, 8192),
    (128, 2, 128, 4096),
    (1, 8, 128, 65536),
)
# Ranks and heads: 32 requests of 1 to 8 query tokens and 8192 to 16384 keys, drawn.
_RAGGED = tuple((world, h) for world in (2, 4) for h in (16, 64, 128))
_STREAM = 0x62656E63
FLATTENED = "flash_mla-flattened"


def flop(inputs: DcpDecodeInputs) -> float:
    """Multiply-adds times two over the keys that each token sees on this rank."""
    group = (inputs.dcp_rank, inputs.dcp_world, inputs.interleave)
    queries = [end - start for start, end in pairwise(inputs.query_start_loc.tolist())]
    seen = sum(
        local_length(max(total - (later if inputs.causal else 0), 0), *group)
        for total, count in zip(inputs.total_lens.tolist(), queries, strict=True)
        for later in range(count)
    )
    return 2.0 * inputs.q.shape[1] * seen * (inputs.q.shape[2] + 512)


def oracle(inputs: DcpDecodeInputs, tokens: Any, device: str) -> tuple[Any, Any]:
    """float64 out and lse of some tokens."""
    import torch_ref

    arguments, options = decode_arguments(inputs, torch_device(device))
    result = torch_ref.dcp_decode_oracle(*arguments, **options, rows=tokens)
    return result.out, result.lse


def redundant(inputs: DcpDecodeInputs) -> tuple[str, ...]:
    """The flattened form where FlashMLA's adapter flattens by itself or has nothing to flatten: its
    own triangle is wrong on a shard, and it takes one query length for all.
    """
    queries = set(np.diff(inputs.query_start_loc).tolist())
    whole = inputs.dcp_world == 1 and len(queries) == 1 and queries != {1}
    return () if whole else (FLATTENED,)


def _joined(values: Any) -> str:
    return "+".join(map(str, values))


def _drawn(least: int, most: int, count: int, number: int) -> list[int]:
    """`count` whole numbers of [least, most], the same on every machine."""
    words = np.random.Philox(key=np.array([number, _STREAM], np.uint64)).random_raw(count)
    return (least + below(words, most - least + 1)).tolist()


def _lines() -> tuple[str, ...]:
    whole = [
        f"dcp-decode:lens={_joined([keys] * b)},q={_joined([q] * b)},h={h}"
        for b, q, h, keys in _SEVEN
    ]
    lens, q = _joined(_drawn(8192, 16384, 32, 1)), _joined(_drawn(1, 8, 32, 0))
    ragged = [f"dcp-decode:lens={lens},q={q},h={h},world={world}" for world, h in _RAGGED]
    return (*whole, *ragged)


BENCH = Bench(
    lines=_lines(),
    against=("flash_mla", FLATTENED),
    flop=flop,
    oracle=oracle,
    redundant=redundant,
    config="jax_impl.decode.kernel_sm90.config:Config",
)
