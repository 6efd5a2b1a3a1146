"""A planner of decode rows as an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from compare.protocol.one_suite import OneSuite
from compare.suites.decode_plan.case import DecodePlanCase


class DecodePlanner(OneSuite[DecodePlanCase, DecodePlanInputs]):
    """A planner of decode rows. home: imports and gives decode_rows, local_seq_lens and
    local_key_counts with the signatures of jax_impl.planning and torch_ref.planning. refuses: why
    its rules don't cover a case.
    """

    case_type = DecodePlanCase
    inputs_type = DecodePlanInputs
    does = "plans decode rows"

    def __init__(
        self,
        name: str,
        home: Callable[[], tuple[Callable[..., Any], ...]],
        *,
        refuses: Callable[[DecodePlanCase], str | None] = lambda case: None,
    ) -> None:
        super().__init__(name)
        self._home = home
        self._refuses = refuses

    def refuses(self, case: DecodePlanCase) -> str | None:
        return self._refuses(case)

    def call(self, inputs: DecodePlanInputs) -> DecodePlanResult:
        decode_rows, local_seq_lens, local_key_counts = self._home()
        group = {
            "dcp_rank": inputs.dcp_rank,
            "dcp_world": inputs.dcp_world,
            "interleave": inputs.interleave,
        }
        rows = decode_rows(
            inputs.query_start_loc,
            inputs.total_lens,
            max_query_len=inputs.max_query_len,
            causal=inputs.causal,
            num_rows=inputs.num_rows,
        )
        counts = local_key_counts(rows, local_seq_lens(inputs.total_lens, **group), **group)
        return DecodePlanResult(
            ragged=bool(rows.ragged),
            request=tuple(int(request) for request in rows.request),
            bound=tuple(int(bound) for bound in rows.bound),
            local_counts=tuple(int(count) for count in counts),
            padding=_flags(rows.padding, len(rows.bound)),
        )


def _flags(padding: Any, rows: int) -> tuple[bool, ...]:
    """Padding as one flag per row: torch_ref has these, jax_impl the number of rows at the end."""
    if isinstance(padding, int):
        return tuple(t >= rows - padding for t in range(rows))
    return tuple(bool(flag) for flag in padding)
