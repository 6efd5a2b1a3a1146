"""The reference: torch_ref's eager V4 prefill path, and its stages by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compare.cases.v4_inputs import V4PrefillInputs
from compare.cases.v4_stages import STAGES
from compare.judging.v4_plan import given_plan
from compare.run import convert
from compare.run.local_v4 import V4Prefill, V4Stages, chunk_stages, plan_chunks
from compare.run.result import V4PrefillResult, V4StagesResult
from compare.run.torch_implementations import TorchDevice, torch_device


def v4_arguments(inputs: V4PrefillInputs, device: str) -> dict[str, Any]:
    """The arguments that all of torch_ref's forms of the path share, on `device`, by keyword."""

    def sent(array: np.ndarray | None) -> Any:
        return None if array is None else convert.to_torch(array, device)

    return {
        "q": sent(inputs.q),
        "swa_cache": sent(inputs.swa_cache),
        "swa_block_table": sent(inputs.swa_block_table),
        "query_start_loc": sent(inputs.query_start_loc),
        "seq_lens": sent(inputs.seq_lens),
        "sm_scale": inputs.sm_scale,
        "swa_page": inputs.swa_page,
        "kv_format": inputs.kv_format,
        "compress_ratio": inputs.compress_ratio,
        "compressed_cache": sent(inputs.compressed_cache),
        "compressed_page": inputs.compressed_page,
        "compressed_block_table": sent(inputs.compressed_block_table),
        "topk_indices": sent(inputs.topk_indices),
        "window": inputs.window,
        "attn_sink": sent(inputs.attn_sink),
        "image_spans": inputs.image_spans,
        "max_image_tokens": inputs.max_image_tokens,
    }


def planner_arguments(inputs: V4PrefillInputs) -> dict[str, Any]:
    """What the chunked form takes besides: the planner's arguments, or the plan."""
    from torch_ref.planning import PrefillChunk

    plan = given_plan(inputs)
    bound = inputs.seq_lens_bound
    return {
        "seq_lens_bound": None if bound is None else bound.tolist(),
        "max_model_len": inputs.max_model_len,
        "max_num_batched_tokens": inputs.max_num_batched_tokens,
        "chunk_size": inputs.chunk_size,
        "plan": None if plan is None else tuple(PrefillChunk(**vars(c)) for c in plan),
    }


def v4_result(
    found: Any, *, planned: bool = True, parts: str | None = None, notes: tuple[str, ...] = ()
) -> V4PrefillResult:
    """torch_ref's result as the judge's. planned: it went by a plan. parts: V4PrefillResult's."""
    maxima = found.max_logits
    return V4PrefillResult(
        out=convert.to_numpy(found.out),
        lse=convert.to_numpy(found.lse),
        max_logits=None if maxima is None else convert.to_numpy(maxima),
        parts=parts,
        plan=plan_chunks(found.plan) if planned else None,
        stages=chunk_stages(found.stages),
        notes=notes,
    )


class TorchV4Prefill(TorchDevice, V4Prefill):
    """torch_ref.v4_prefill: plan, gather, combine and attend, eagerly."""

    def warm_up(self) -> None:
        import torch_ref

        _ = torch_ref.v4_prefill

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        import torch_ref

        arguments = v4_arguments(inputs, torch_device(self.device))
        found = torch_ref.v4_prefill(**arguments, **planner_arguments(inputs), keep_stages=True)
        return v4_result(found)


class TorchV4Stages(TorchDevice, V4Stages):
    """torch_ref's index builders and its gather."""

    def warm_up(self) -> None:
        import torch_ref.indices
        import torch_ref.kv_cache  # noqa: F401

    def call(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        from torch_ref.indices import combine_topk_swa_indices, global_topk_slots
        from torch_ref.kv_cache import gather_kv

        functions = {
            "combine": combine_topk_swa_indices,
            "global_topk": global_topk_slots,
            "gather": gather_kv,
        }
        return run_stage(functions[stage], stage, arguments, torch_device(self.device))


def run_stage(
    function: Callable[..., Any], stage: str, arguments: dict[str, Any], device: str
) -> V4StagesResult:
    """A stage by a function with the signature that torch_ref's own has; its arguments are copied,
    since a gather writes into the workspace.
    """
    from torch_ref.kv_cache import PagedKV

    given: dict[str, Any] = {
        name: convert.to_torch(value, device, copy=True) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    if stage == "gather":
        paged = PagedKV(given.pop("cache"), given.pop("page_size"), given.pop("kv_format"))
        found: tuple[Any, ...] = (function(paged, **given),)
    else:
        found = function(**given)
    return V4StagesResult(
        arrays={n: convert.to_numpy(a, n) for n, a in zip(STAGES[stage], found, strict=True)}
    )
