"""The CUDA kernels, through torch_ref's adapters."""

from __future__ import annotations

from compare.houses.flash_mla import kernel_launch
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.protocol import arrays as convert
from compare.protocol.implementation import Distribution
from compare.protocol.timing import Launch
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.sparse_prefill.implementation import SparsePrefill
from compare.suites.sparse_prefill.torch_adapter import torch_arguments


class FlashMla(SparsePrefill):
    """FlashMLA's flash_mla_sparse_fwd in whichever build is importable."""

    def unavailable(self) -> str | None:
        from torch_ref.cuda import flash_mla_adapter

        if self.device == "cpu":
            return "FlashMLA needs a CUDA GPU, not the device 'cpu'"
        return flash_mla_adapter.unsupported_reason()

    def warm_up(self) -> None:
        from torch_ref.cuda import flash_mla_adapter

        flash_mla_adapter.find_build()

    def distribution(self) -> Distribution | None:
        from torch_ref.cuda import flash_mla_adapter

        build = flash_mla_adapter.find_build()
        return None if build is None else Distribution(build.name, build.version)

    def refuses(self, case: SparsePrefillCase) -> str | None:
        from torch_ref.cuda import flash_mla_adapter

        return flash_mla_adapter.unsupported_reason(
            s_q=case.tokens,
            s_kv=case.s_kv,
            heads=case.h,
            d_qk=case.d,
            topk=case.topk,
            sm_scale=case.scale,
            allow_empty=bool(case.q_lens),
        )

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        return self._call(inputs, allow_empty=False)

    def call_chunk(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        # A plan with an empty chunk is executed as an engine would: the abort is the answer.
        return self._call(inputs, allow_empty=True)

    def _call(self, inputs: SparsePrefillInputs, allow_empty: bool) -> SparsePrefillResult:
        from torch_ref.cuda import flash_mla_adapter

        arguments, options = torch_arguments(inputs, self.device or "cuda")
        result, notes = flash_mla_adapter.sparse_prefill(
            *arguments, **options, allow_empty=allow_empty
        )
        build = self.distribution()
        found = () if build is None else (f"FlashMLA build: {build.name} {build.version}",)
        return SparsePrefillResult(
            out=convert.to_numpy(result.out),
            max_logits=convert.to_numpy(result.max_logits),
            lse=convert.to_numpy(result.lse),
            notes=(*found, *notes),
        )

    def prepare(self, inputs: SparsePrefillInputs) -> Launch:
        """FlashMLA's own function. ValueError where the adapter would have to pad."""
        device = self.device or "cuda"
        arguments, options = torch_arguments(inputs, device)
        return kernel_launch(arguments, options, device)
