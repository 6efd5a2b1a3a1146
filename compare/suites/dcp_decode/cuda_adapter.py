"""The CUDA kernels of decode, through torch_ref's adapters."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from compare.houses.torch_backend import torch_launch
from compare.protocol import arrays as convert
from compare.protocol.implementation import Distribution
from compare.protocol.timing import Launch
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.implementation import DcpDecode
from compare.suites.dcp_decode.torch_adapter import as_result, decode_arguments


class CudaDcpDecode(DcpDecode):
    """Base: a subclass names its adapter and what of a case the adapter judges."""

    kernel: str
    parts = "float32"
    """In what dtype the kernel keeps results over parts of the keys until they are merged."""

    def adapter(self) -> ModuleType:
        """torch_ref's module with unsupported_reason and dcp_decode."""
        raise NotImplementedError

    def asked(self, case: DcpDecodeCase) -> dict[str, Any]:
        """What unsupported_reason is to know of a case."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """What every call of the adapter is given."""
        return {}

    def distribution(self) -> Distribution | None:
        """The package of the kernel that runs."""
        raise NotImplementedError

    def build(self) -> tuple[str, ...]:
        """Which build runs, in a sentence."""
        raise NotImplementedError

    def unavailable(self) -> str | None:
        if self.device == "cpu":
            return f"{self.kernel} needs a CUDA GPU, not the device 'cpu'"
        return self.adapter().unsupported_reason(**self.options())

    def refuses(self, case: DcpDecodeCase) -> str | None:
        return self.adapter().unsupported_reason(**self.options(), **self.asked(case))

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        result, notes = self.adapter().dcp_decode(self._checked(inputs), **self.options())
        return DcpDecodeResult(
            out=convert.to_numpy(result.out),
            lse=convert.to_numpy(result.lse),
            parts=self.parts,
            notes=(*self.build(), *notes),
        )

    def prepare(self, inputs: DcpDecodeInputs) -> Launch:
        """The kernel's call, laid out and planned before."""
        prepare = getattr(self.adapter(), "prepare_decode", None)
        if prepare is None:
            raise NotImplementedError(f"{self.name} has no call that can be prepared")
        prepared = prepare(self._checked(inputs), **self.options(), **self.layout())
        return torch_launch(
            prepared.launch, self.device or "cuda", lambda found: as_result(prepared.finish(found))
        )

    def layout(self) -> dict[str, Any]:
        """How a prepared call is laid out."""
        return {}

    def _checked(self, inputs: DcpDecodeInputs) -> Any:
        from torch_ref.decode.inputs import check_decode_inputs

        arguments, more = decode_arguments(inputs, self.device or "cuda")
        return check_decode_inputs(*arguments, **more)


class FlashMlaDecode(CudaDcpDecode):
    """FlashMLA's dense decode in whichever build is importable. flatten: it is timed with one row
    per token, as DCP needs it, where the adapter would run whole requests.
    """

    kernel = "FlashMLA"

    def __init__(self, name: str, device: str | None = None, *, flatten: bool = False) -> None:
        super().__init__(name, device)
        self._flatten = flatten

    def layout(self) -> dict[str, Any]:
        return {"flatten": self._flatten}

    def adapter(self) -> ModuleType:
        from torch_ref.cuda import flash_mla_decode

        return flash_mla_decode

    def warm_up(self) -> None:
        self.adapter().find_build()

    def asked(self, case: DcpDecodeCase) -> dict[str, Any]:
        return {"page_size": case.page, **_dtypes(case), "sm_scale": case.scale}

    def distribution(self) -> Distribution | None:
        build = self.adapter().find_build()
        return None if build is None else Distribution(build.name, build.version)

    def build(self) -> tuple[str, ...]:
        build = self.distribution()
        return () if build is None else (f"FlashMLA build: {build.name} {build.version}",)


class FlashInferDecode(CudaDcpDecode):
    """FlashInfer's BatchMLAPagedAttentionWrapper with backend fa3 or fa2."""

    kernel = "FlashInfer"
    parts = "bfloat16"

    def __init__(self, name: str, device: str | None = None, *, backend: str) -> None:
        super().__init__(name, device)
        self._backend = backend

    def adapter(self) -> ModuleType:
        from torch_ref.cuda import flashinfer_adapter

        return flashinfer_adapter

    def options(self) -> dict[str, Any]:
        return {"backend": self._backend}

    def refuses(self, case: DcpDecodeCase) -> str | None:
        if case.nan != "none":
            return (
                f"nan={case.nan}: FlashInfer's kernels lose a NaN in their running maximum: out "
                "and lse of its row may be numbers"
            )
        return super().refuses(case)

    def asked(self, case: DcpDecodeCase) -> dict[str, Any]:
        return {**_dtypes(case), "sm_scale": case.scale}

    def distribution(self) -> Distribution:
        return Distribution("flashinfer-python", self.adapter().version())

    def build(self) -> tuple[str, ...]:
        return (f"FlashInfer {self.distribution().version}, backend {self._backend}",)


class FlashInferCuteDsl(CudaDcpDecode):
    """FlashInfer's own DCP decode for Blackwell."""

    kernel = "FlashInfer"

    def adapter(self) -> ModuleType:
        from torch_ref.cuda import flashinfer_cute_dsl

        return flashinfer_cute_dsl

    def asked(self, case: DcpDecodeCase) -> dict[str, Any]:
        return {
            "page_size": case.page,
            **_dtypes(case),
            "dcp_world": case.world,
            "interleave": case.interleave,
            "sm_scale": case.scale,
        }

    def distribution(self) -> Distribution:
        from torch_ref.cuda.flashinfer_adapter import version

        return Distribution("flashinfer-python", version())

    def build(self) -> tuple[str, ...]:
        return (f"FlashInfer {self.distribution().version}, backend cute-dsl",)


def _dtypes(case: DcpDecodeCase) -> dict[str, Any]:
    import torch

    named = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    return {"q_dtype": named[case.q_dtype], "kv_dtype": named[case.kv]}
