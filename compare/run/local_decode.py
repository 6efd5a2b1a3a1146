"""What the implementations of decode that run inside this process have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.cases.case import Case
from compare.cases.dcp_decode import DcpDecodeCase
from compare.cases.decode_plan import DecodePlanCase
from compare.cases.inputs import DcpDecodeInputs, DecodePlanInputs, Inputs
from compare.run.implementations import Unsupported
from compare.run.one_suite import OneSuite
from compare.run.result import DcpDecodeResult, DecodePlanResult
from compare.run.shards import Merge, merge_by_torch, run_shards


class DcpDecode(OneSuite[DcpDecodeCase]):
    """Base of DCP decode: a subclass says what stops it here and computes one rank's call."""

    suites = frozenset({"dcp-decode"})
    case_type = DcpDecodeCase
    merge: Merge = staticmethod(merge_by_torch)

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        """One rank's call; inputs.shards is None."""
        raise NotImplementedError

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        """One rank's call whose result is to be merged: out may be float32."""
        return self.call(inputs)

    def run(self, inputs: Inputs) -> DcpDecodeResult:
        if not isinstance(inputs, DcpDecodeInputs):
            raise Unsupported(f"{self.name} is for dcp-decode")
        if inputs.shards is not None:
            return run_shards(self.call_shard, inputs, merge=self.merge)
        return self.call(inputs)


class DecodePlanner:
    """A planner of decode rows. home: imports and gives decode_rows, local_seq_lens and
    local_key_counts with the signatures of jax_impl.planning and torch_ref.planning. refuses: why
    its rules don't cover a case.
    """

    suites = frozenset({"decode-plan"})

    def __init__(
        self,
        name: str,
        home: Callable[[], tuple[Callable[..., Any], ...]],
        *,
        refuses: Callable[[DecodePlanCase], str | None] = lambda case: None,
    ) -> None:
        self.name = name
        self._home = home
        self._refuses = refuses

    def unavailable(self) -> str | None:
        """A planner runs anywhere."""
        return None

    def supports(self, case: Case) -> str | None:
        if not isinstance(case, DecodePlanCase):
            return f"{self.name} plans decode rows; it isn't for {case.suite}"
        return self._refuses(case)

    def run(self, inputs: Inputs) -> DecodePlanResult:
        if not isinstance(inputs, DecodePlanInputs):
            raise Unsupported(f"{self.name} is for decode-plan")
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
