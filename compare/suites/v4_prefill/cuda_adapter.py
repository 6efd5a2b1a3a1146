"""The V4 prefill path through FlashMLA, by torch_ref's adapters."""

from __future__ import annotations

from types import ModuleType

from compare.generate.v4_batch import WIDTH
from compare.houses.flash_mla import kernel_launch
from compare.protocol.implementation import Distribution
from compare.protocol.timing import Launch
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_prefill.implementation import V4Prefill
from compare.suites.v4_prefill.torch_adapter import (
    gathered,
    planner_arguments,
    v4_arguments,
    v4_result,
)


class _FlashMla(V4Prefill):
    """Base: a subclass names its adapter."""

    def adapter(self) -> ModuleType:
        """torch_ref's module with find_build and unsupported_reason."""
        raise NotImplementedError

    def unavailable(self) -> str | None:
        if self.device == "cpu":
            return "FlashMLA needs a CUDA GPU, not the device 'cpu'"
        return self.adapter().unsupported_reason()

    def warm_up(self) -> None:
        self.adapter().find_build()

    def distribution(self) -> Distribution | None:
        build = self.adapter().find_build()
        return None if build is None else Distribution(build.name, build.version)

    def build(self) -> tuple[str, ...]:
        """Which build runs, in a sentence."""
        build = self.distribution()
        return () if build is None else (f"FlashMLA build: {build.name} {build.version}",)


class FlashMlaV4(_FlashMla):
    """torch_ref's plan, gathers and lists, with FlashMLA's sparse prefill as attention."""

    def adapter(self) -> ModuleType:
        from torch_ref.cuda import flash_mla_adapter

        return flash_mla_adapter

    def refuses(self, case: V4PrefillCase) -> str | None:
        return self.adapter().unsupported_reason(
            heads=case.h, d_qk=WIDTH, topk=case.slots, sm_scale=case.scale
        )

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        found, notes = self.adapter().v4_prefill(
            **v4_arguments(inputs, self.device or "cuda"),
            **planner_arguments(inputs),
            keep_stages=True,
        )
        return v4_result(found, notes=(*self.build(), *notes))

    def prepare(self, inputs: V4PrefillInputs) -> Launch:
        """FlashMLA's attention alone, on the workspace that torch_ref's stages gathered: neither
        gathers nor lists are in its time.
        """
        given = gathered(inputs, self.device or "cuda")
        return kernel_launch(*given.call, self.device or "cuda")


class FlashMlaFp8(_FlashMla):
    """FlashMLA's sparse decode on the FP8 pages themselves, each token a batch entry of its own."""

    def adapter(self) -> ModuleType:
        from torch_ref.cuda import flash_mla_sparse_decode

        return flash_mla_sparse_decode

    def refuses(self, case: V4PrefillCase) -> str | None:
        return self.adapter().unsupported_reason(
            kv_format=case.format, heads=case.h, sm_scale=case.scale
        )

    def call(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        from torch_ref.v4.inputs import check_v4_inputs

        checked = check_v4_inputs(**v4_arguments(inputs, self.device or "cuda"))
        found, notes = self.adapter().v4_prefill(checked)
        # Split over keys, merged in float32.
        notes = (*self.build(), *notes)
        return v4_result(found, planned=False, parts="float32", notes=notes)
