"""An importable vLLM's own stages, through torch_ref's adapter."""

from __future__ import annotations

from typing import Any

from compare.houses.torch_backend import torch_device
from compare.protocol.implementation import Distribution
from compare.suites.v4_stages.call import V4StagesResult
from compare.suites.v4_stages.case import V4StagesCase
from compare.suites.v4_stages.implementation import V4Stages
from compare.suites.v4_stages.torch_adapter import run_stage


class VllmStages(V4Stages):
    """The stage functions of the vLLM that is importable, whatever its version."""

    def unavailable(self) -> str | None:
        from torch_ref.cuda import vllm_stages

        return vllm_stages.unsupported_reason("combine")

    def distribution(self) -> Distribution:
        from torch_ref.cuda import vllm_adapter

        return Distribution("vllm", vllm_adapter.version() or "unknown")

    def refuses(self, case: V4StagesCase) -> str | None:
        from torch_ref.cuda import vllm_stages

        if case.stage not in ("combine", "global_topk", "gather"):
            return f"stage={case.stage}: only vLLM's combine, global_topk and gather can be called"
        stage: Any = case.stage
        return vllm_stages.unsupported_reason(stage, kv_format=case.format)

    def stage(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        from torch_ref.cuda import vllm_adapter, vllm_stages

        functions = {
            "combine": vllm_stages.combine_topk_swa_indices,
            "global_topk": vllm_stages.global_topk_slots,
            "gather": vllm_stages.gather_kv,
        }
        found = run_stage(functions[stage], stage, arguments, torch_device(self.device))
        return V4StagesResult(arrays=found.arrays, notes=(f"vLLM {vllm_adapter.version()}",))
