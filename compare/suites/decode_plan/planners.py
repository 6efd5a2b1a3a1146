"""The planners of decode rows, of jax_impl and of torch_ref."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compare.suites.decode_plan.case import DecodePlanCase
from compare.suites.decode_plan.planner import DecodePlanner


def jax_decode_planner(name: str, device: str | None = None) -> DecodePlanner:
    """jax_impl's planner of decode rows: the fixed rules."""

    def home() -> tuple[Callable[..., Any], ...]:
        from jax_impl.planning import decode_rows, local_key_counts, local_seq_lens

        return decode_rows, local_seq_lens, local_key_counts

    return DecodePlanner(name, home)


def torch_decode_planner(name: str, device: str | None = None, *, rules: str) -> DecodePlanner:
    """torch_ref's planner of decode rows under `rules` (fixed or vllm-0.33.0)."""

    def home() -> tuple[Callable[..., Any], ...]:
        from torch_ref.planning import decode_rows, local_key_counts, local_seq_lens

        rows = functools.partial(decode_rows, rules=rules)  # type: ignore[arg-type]
        return rows, local_seq_lens, local_key_counts

    def refuses(case: DecodePlanCase) -> str | None:
        if rules == "fixed" or case.world > 1:
            return None
        return (
            "with one rank vLLM 0.33.0 gives the kernel a compact query and no row a bound; its "
            "rules for rows are those of several ranks"
        )

    return DecodePlanner(name, home, refuses=refuses)
