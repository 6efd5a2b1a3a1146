"""torch_ref's V4 prefill path."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from compare.houses.torch_backend import TorchDevice, torch_device, torch_launch
from compare.judging.plans import plan_chunks
from compare.protocol import arrays as convert
from compare.protocol.timing import Launch
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.implementation import V4Prefill, chunk_stages


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

    plan = inputs.prescribed_plan
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
        plan=plan_chunks(found.plan, "torch_ref") if planned else None,
        stages=chunk_stages(found.stages),
        notes=notes,
    )


class TorchV4Prefill(TorchDevice, V4Prefill):
    """torch_ref.v4_prefill: plan, gather, combine and attend, eagerly."""

    functions = ("torch_ref:v4_prefill",)

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        import torch_ref

        arguments = v4_arguments(inputs, torch_device(self.device))
        found = torch_ref.v4_prefill(**arguments, **planner_arguments(inputs), keep_stages=True)
        return v4_result(found)

    def prepare(self, inputs: V4PrefillInputs) -> Launch:
        """The attention alone, on the workspace that torch_ref's stages gathered."""
        import torch_ref

        device = torch_device(self.device)
        arguments, options = gathered(inputs, device).call
        return torch_launch(
            lambda: torch_ref.sparse_prefill(*arguments, **options), device, attention_result
        )


def attention_result(found: Any) -> V4PrefillResult:
    """torch_ref's result of one attention call as the judge's."""
    out, max_logits, lse = map(convert.to_numpy, (found.out, found.max_logits, found.lse))
    return V4PrefillResult(out=out, max_logits=max_logits, lse=lse)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """workspace [n, M, 512] bfloat16, indices [T, C] int32, lengths [T] int32: torch tensors that
    torch_ref's plan, gathers and lists made. q [T, H, 512].
    """

    q: Any
    workspace: Any
    indices: Any
    lengths: Any
    sm_scale: float
    attn_sink: Any

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The attention as torch_ref's arguments, positional and keyword."""
        kv = self.workspace.flatten(0, 1)
        options = {"d_v": 512, "attn_sink": self.attn_sink, "topk_length": self.lengths}
        return (self.q, kv, self.indices, self.sm_scale), options


def gathered(inputs: V4PrefillInputs, device: str) -> Gathered:
    """No attention is computed. NotImplementedError where the plan has several chunks."""
    import torch

    import torch_ref

    def attend(q: Any, *_: Any, **__: Any) -> Any:
        statistics = q.new_zeros(q.shape[:2], dtype=torch.float32)
        return torch_ref.SparsePrefillResult(torch.zeros_like(q), statistics, statistics)

    arguments = v4_arguments(inputs, device)
    more = planner_arguments(inputs)
    found = torch_ref.v4_prefill(**arguments, **more, attend=attend, keep_stages=True)
    assert found.stages is not None
    if len(found.stages) != 1:
        raise NotImplementedError(
            f"stages alone are timed in one chunk; the plan has {len(found.stages)}"
        )
    (stage,) = found.stages
    return Gathered(
        q=arguments["q"],
        workspace=stage.workspace,
        indices=stage.indices,
        lengths=stage.lengths,
        sm_scale=inputs.sm_scale,
        attn_sink=arguments["attn_sink"],
    )
