"""The planners of prefill chunks: of jax_impl, of torch_ref under both sets of rules, and of an
importable vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compare.protocol.implementation import Distribution
from compare.suites.prefill_plan.planner import Planner


def jax_planner(name: str, device: str | None = None) -> Planner:
    """jax_impl's chunk planner: the fixed rules."""

    def home() -> Callable[..., Any]:
        from jax_impl.planning import plan_prefill_chunks

        return plan_prefill_chunks

    return Planner(name, home)


def torch_planner(name: str, device: str | None = None, *, rules: str) -> Planner:
    """torch_ref's chunk planner under `rules` (fixed or vllm-0.33.0)."""

    def home() -> Callable[..., Any]:
        from torch_ref.planning import plan_prefill_chunks

        return functools.partial(plan_prefill_chunks, rules=rules)  # type: ignore[arg-type]

    return Planner(name, home)


def vllm_planner(name: str, device: str | None = None) -> Planner:
    """The chunk planner of the vLLM that is importable, whatever its version."""

    def home() -> Callable[..., Any]:
        from torch_ref.cuda import vllm_adapter

        return vllm_adapter.plan_prefill_chunks

    @functools.cache
    def reason() -> str | None:
        from torch_ref.cuda import vllm_adapter

        return vllm_adapter.unsupported_reason()

    def notes() -> tuple[str, ...]:
        from torch_ref.cuda import vllm_adapter

        return (f"vLLM {vllm_adapter.version()}",)

    def distribution() -> Distribution:
        from torch_ref.cuda import vllm_adapter

        return Distribution("vllm", vllm_adapter.version() or "unknown")

    return Planner(name, home, reason=reason, notes=notes, distribution=distribution)
