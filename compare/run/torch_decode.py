"""The reference: torch_ref's eager decode, and its planner of decode rows under both sets of
rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compare.cases.decode_plan import DecodePlanCase
from compare.cases.inputs import DcpDecodeInputs
from compare.run import convert
from compare.run.local_decode import DcpDecode, DecodePlanner
from compare.run.result import DcpDecodeResult
from compare.run.torch_implementations import TorchDevice, torch_device


def decode_arguments(inputs: DcpDecodeInputs, device: str) -> tuple[tuple[Any, ...], dict]:
    """The positional and keyword arguments of torch_ref's decode, on `device`; lengths stay on the
    host.
    """
    q, kv_cache, table = (
        convert.to_torch(a, device) for a in (inputs.q, inputs.kv_cache, inputs.block_table)
    )
    lens, starts = (convert.to_torch(a) for a in (inputs.seq_lens, inputs.query_start_loc))
    return (q, kv_cache, table, lens, starts, inputs.sm_scale), {
        "total_lens": convert.to_torch(inputs.total_lens),
        "dcp_rank": inputs.dcp_rank,
        "dcp_world": inputs.dcp_world,
        "interleave": inputs.interleave,
        "causal": inputs.causal,
        "kv_scale": inputs.kv_scale,
        "q_scale": inputs.q_scale,
    }


class TorchDcpDecode(TorchDevice, DcpDecode):
    """torch_ref.dcp_decode: the kernels' precision recipe, eagerly."""

    def warm_up(self) -> None:
        import torch_ref

        _ = torch_ref.dcp_decode

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        return self._call(inputs)

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        import torch

        return self._call(inputs, out_dtype=torch.float32)

    def _call(self, inputs: DcpDecodeInputs, **more: Any) -> DcpDecodeResult:
        import torch_ref

        arguments, options = decode_arguments(inputs, torch_device(self.device))
        result = torch_ref.dcp_decode(*arguments, **options, **more)
        return DcpDecodeResult(out=convert.to_numpy(result.out), lse=convert.to_numpy(result.lse))


def torch_decode_planner(name: str, rules: str) -> DecodePlanner:
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
