"""The V4 prefill path with CUDA kernels in it, and an engine's own stages, through torch_ref's
adapters."""

from __future__ import annotations

from typing import Any

from compare.cases.v4_inputs import V4PrefillInputs
from compare.cases.v4_prefill import WIDTH, V4PrefillCase
from compare.run.local_v4 import V4Prefill
from compare.run.result import V4PrefillResult
from compare.run.torch_v4 import planner_arguments, v4_arguments, v4_result


class FlashMlaV4(V4Prefill):
    """torch_ref's plan, gathers and lists, with FlashMLA's sparse prefill as attention."""

    def unavailable(self) -> str | None:
        from torch_ref.cuda import flash_mla_adapter

        if self.device == "cpu":
            return "FlashMLA needs a CUDA GPU, not the device 'cpu'"
        return flash_mla_adapter.unsupported_reason()

    def warm_up(self) -> None:
        from torch_ref.cuda import flash_mla_adapter

        flash_mla_adapter.find_build()

    def refuses(self, case: V4PrefillCase) -> str | None:
        from torch_ref.cuda import flash_mla_adapter

        return flash_mla_adapter.unsupported_reason(
            heads=case.h, d_qk=WIDTH, topk=case.slots, sm_scale=case.scale
        )

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        import torch_ref
        from torch_ref.cuda import flash_mla_adapter

        said: list[str] = []

        def attend(*arguments: Any, **options: Any) -> Any:
            # A plan with an empty chunk is executed as an engine would: the abort is the answer.
            result, notes = flash_mla_adapter.sparse_prefill(
                *arguments, **options, allow_empty=True
            )
            said.extend(notes)
            return result

        found = torch_ref.v4_prefill(
            **v4_arguments(inputs, self.device or "cuda"),
            **planner_arguments(inputs),
            attend=attend,
            keep_stages=True,
        )
        build = flash_mla_adapter.find_build()
        named = () if build is None else (f"FlashMLA build: {build.name} {build.version}",)
        return v4_result(found, notes=(*named, *dict.fromkeys(said)))
