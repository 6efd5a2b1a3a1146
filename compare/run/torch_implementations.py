"""The reference: torch_ref's eager sparse prefill, its planner under both sets of rules, and the
planner of an importable vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compare.cases.inputs import SparsePrefillInputs
from compare.run import convert
from compare.run.local import Planner, SparsePrefill
from compare.run.result import SparsePrefillResult


def torch_device(device: str | None) -> str:
    """The torch device that a word of the command line means; None: cuda where there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def torch_arguments(inputs: SparsePrefillInputs, device: str) -> tuple[tuple[Any, ...], dict]:
    """The positional and keyword arguments of torch_ref's sparse prefill, on `device`."""
    sink, length = inputs.attn_sink, inputs.topk_length
    q, kv, indices = (convert.to_torch(a, device) for a in (inputs.q, inputs.kv, inputs.indices))
    return (q, kv, indices, inputs.sm_scale), {
        "d_v": inputs.d_v,
        "attn_sink": None if sink is None else convert.to_torch(sink, device),
        "topk_length": None if length is None else convert.to_torch(length, device),
    }


class TorchDevice:
    """What runs wherever torch does."""

    device: str | None

    def unavailable(self) -> str | None:
        import torch

        if self.device and self.device.startswith("cuda") and not torch.cuda.is_available():
            return f"torch sees no CUDA GPU here, so there is no device {self.device!r}"
        return None


class TorchSparsePrefill(TorchDevice, SparsePrefill):
    """torch_ref.sparse_prefill: the kernel's precision recipe, eagerly."""

    def warm_up(self) -> None:
        import torch_ref

        _ = torch_ref.sparse_prefill

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        import torch_ref

        arguments, options = torch_arguments(inputs, torch_device(self.device))
        result = torch_ref.sparse_prefill(*arguments, **options)
        return SparsePrefillResult(
            out=convert.to_numpy(result.out),
            max_logits=convert.to_numpy(result.max_logits),
            lse=convert.to_numpy(result.lse),
        )


def torch_planner(name: str, rules: str) -> Planner:
    """torch_ref's chunk planner under `rules` (fixed or vllm-0.33.0)."""

    def home() -> Callable[..., Any]:
        from torch_ref.planning import plan_prefill_chunks

        return functools.partial(plan_prefill_chunks, rules=rules)  # type: ignore[arg-type]

    return Planner(name, home)


def vllm_planner() -> Planner:
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

    return Planner("vllm", home, reason=reason, notes=notes)
