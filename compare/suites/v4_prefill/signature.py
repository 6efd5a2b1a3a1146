"""What a function of the V4 prefill path is called with and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from compare.judging.plans import plan_chunks
from compare.protocol.signature import BF16, FLOAT32, INT32, Signature, Tensor
from compare.protocol.values import field_of
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_prefill.implementation import chunk_stages

_CACHE = ("uint8", "bfloat16")
_STAGE = ("workspace", "indices", "lengths")


class V4PrefillSignature(Signature[V4PrefillInputs, V4PrefillResult]):
    """The whole path on one batch."""

    def read(self, answer: Any, name: str, inputs: V4PrefillInputs) -> V4PrefillResult:
        """A mapping or an object may have plan too, a sequence of chunks, and stages, one for each
        chunk, as objects with workspace, indices and lengths or mappings of these; None and what
        isn't there aren't compared.
        """
        arrays = self.arrays(answer, name)
        plan, stages = (field_of(answer, field) for field in self.beside)
        chunks = None if plan is None else plan_chunks(plan, name)
        if stages is not None:
            stages = [_stage(stage, number, name) for number, stage in enumerate(stages)]
        return V4PrefillResult(**arrays, plan=chunks, stages=chunk_stages(stages))


def _stage(stage: Any, number: int, name: str) -> Any:
    """An object with the three attributes, or a mapping of them, as an object."""
    if isinstance(stage, Mapping) and all(field in stage for field in _STAGE):
        return SimpleNamespace(**{field: stage[field] for field in _STAGE})
    if all(hasattr(stage, field) for field in _STAGE):
        return stage
    raise TypeError(
        f"{name} returned a {type(stage).__name__} as stage {number}; accepted: an object with "
        f"{', '.join(_STAGE)}, or a mapping of these"
    )


SIGNATURE = V4PrefillSignature(
    inputs_type=V4PrefillInputs,
    result_type=V4PrefillResult,
    telling="swa_cache",
    tensors={
        "q": Tensor(dtypes=BF16, axes="T H 512"),
        "swa_cache": Tensor(dtypes=_CACHE, axes="pages ..."),
        "swa_block_table": Tensor(dtypes=INT32, axes="n columns"),
        "compressed_cache": Tensor(dtypes=_CACHE, axes="compressed_pages ...", needed=False),
        "compressed_block_table": Tensor(dtypes=INT32, axes="n compressed_columns", needed=False),
        "topk_indices": Tensor(dtypes=INT32, axes="T topk", needed=False),
        "query_start_loc": Tensor(dtypes=INT32, axes="n+1"),
        "seq_lens": Tensor(dtypes=INT32, axes="n"),
        "seq_lens_bound": Tensor(dtypes=INT32, axes="n", needed=False, host=True),
        "attn_sink": Tensor(dtypes=FLOAT32, axes="H", needed=False),
    },
    numbers=("sm_scale",),
    withheld=("plan_rules",),
    results={"out": True, "lse": True, "max_logits": False, "out_rows": False},
    answered=("out", "max_logits", "lse"),
    beside=("plan", "stages"),
    empty_lse="+inf",
)
