"""Small inputs whose right results can be written down, for both torch implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ref import sparse_prefill, sparse_prefill_oracle

Outputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of one call; `but` changes some of them."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    sm_scale: float = 1.0
    attn_sink: Tensor | None = None
    topk_length: Tensor | None = None

    def but(self, **changes: Any) -> Call:
        return replace(self, **changes)

    def keywords(self) -> dict[str, Any]:
        return dict(self.__dict__)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zero_query(index_row: list[int], *, S: int = 10, heads: int = 1) -> Call:
    """One token with q = 0, so that every valid key has logit 0; V row j holds j in each column."""
    kv = torch.arange(S, dtype=torch.float32)[:, None].expand(S, 512)
    return Call(
        q=torch.zeros(1, heads, 512, dtype=torch.bfloat16),
        kv=kv.bfloat16(),
        indices=int32([index_row]),
    )


def key_logits(dots: list[float], values: list[float]) -> Call:
    """One token, one head; key j has q.k = dots[j] and V = values[j] in columns 1 to 511."""
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    kv = torch.tensor(values)[:, None].expand(len(values), 512).clone()
    kv[:, 0] = torch.tensor(dots)
    return Call(q=q, kv=kv.bfloat16(), indices=torch.arange(len(dots), dtype=torch.int32)[None])


def random_call(
    *, T: int = 3, H: int = 4, D: int = 576, S: int = 50, K: int = 40, seed: int = 0
) -> Call:
    """N(0, 1) q and kv, indices with invalid slots on both sides, finite sinks, ragged lengths."""
    g = torch.Generator().manual_seed(seed)
    return Call(
        q=torch.randn(T, H, D, generator=g).bfloat16(),
        kv=torch.randn(S, D, generator=g).bfloat16(),
        indices=torch.randint(-5, S + 5, (T, K), generator=g, dtype=torch.int32),
        sm_scale=D**-0.5,
        attn_sink=torch.randn(H, generator=g),
        topk_length=torch.randint(K // 2, K + 1, (T,), generator=g, dtype=torch.int32),
    )


class Make:
    """The makers above, for tests that can't import a conftest."""

    zero_query = staticmethod(zero_query)
    key_logits = staticmethod(key_logits)
    random = staticmethod(random_call)
    int32 = staticmethod(int32)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make


@pytest.fixture(params=["oracle", "torch"])
def run(request: pytest.FixtureRequest) -> Callable[[Call], Outputs]:
    """Runs a call with the oracle and with the eager recipe: out, max_logits and lse."""
    function = {"oracle": sparse_prefill_oracle, "torch": sparse_prefill}[request.param]

    def outputs(call: Call) -> Outputs:
        result = function(**call.keywords())
        return result.out, result.max_logits, result.lse

    return outputs
