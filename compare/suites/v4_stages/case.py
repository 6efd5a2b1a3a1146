"""The case line of the suite ``v4-stages``: one stage of DeepSeek-V4's prefill path by itself."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.generate.v4_batch import IMAGES, Image, V4Batch
from compare.generate.wide_tokens import FORMATS as WIDE_FORMATS
from compare.protocol.case import Case, CaseError, case_field, integer, integer_or, integers, word

STAGES = {
    "combine": ("indices", "lengths"),
    "global_topk": ("slots", "lengths"),
    "gather": ("workspace",),
    "paged_swa": ("slots", "lengths"),
    "c128": ("slots", "lengths"),
    "dspark": ("slots", "lengths"),
    "quantise": ("cache",),
}
"""By stage: the names of what it gives back."""

_KEYS_OF_STAGES = {
    "pad": ("global_topk", "paged_swa", "c128", "dspark", "quantise"),
    "offset": ("gather",),
    "spare": ("gather", "paged_swa", "dspark"),
    "replay": ("paged_swa",),
}
_WITHOUT_COMPRESSED = ("paged_swa", "dspark", "quantise")
_COMPRESSED = ("global_topk", "c128")


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4StagesCase(Case):
    """Keys of ``v4-stages:...``.

    stage: combine (a token's compressed entries and window as rows of its chunk's workspace),
        global_topk (a decode token's compressed entries as slots of the paged cache), gather
        (a paged cache's tokens in bfloat16 in the workspace), paged_swa (a token's window as
        slots), c128 (all compressed entries that a token sees as slots, in lists of topk columns),
        dspark (the window of a draft block that isn't causal, as slots) or quantise (this step's
        tokens, written to the paged cache).
    format: of the pages; gather and quantise take v3.2-fp8 and bf16-576 too, DeepSeek-V3.2's rows
        of 576, of which there is no compressed cache.
    record: the number of a call whose result is recorded from vLLM, with its inputs; nothing else
        is written then but the stage.
    seq, q, start, ratio, topk, window, page, images, max_image, bound, seed: as in
        v4-prefill. All requests are one chunk. gather with ratio=1 is that of the window, with
        another ratio that of the compressed cache.
    pad: tokens of global_topk that belong to no request; of the other lists of slots and of
        quantise, tokens of the batch that are padding. offset: the workspace row that a gather
        begins at. spare: workspace rows behind the last one that is needed; of paged_swa and
        dspark, rows behind the batch's tokens. replay: the first position of each request that
        paged_swa may list, at most the first of this step's.
    """

    suite: ClassVar[str] = "v4-stages"

    stage: str = case_field("none", word(*STAGES))
    record: int | str = case_field("none", integer_or("none", 0))
    seq: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    start: int = case_field(0, integer(0))
    ratio: int = case_field(4, word("1", "2", "4", "128", convert=int))
    topk: int = case_field(64, integer(1))
    window: int = case_field(128, integer(1))
    page: int = case_field(64, integer(1))
    format: str = case_field("v4-fp8", word("v4-fp8", "bf16", *WIDE_FORMATS))
    images: tuple[Image, ...] = case_field((), IMAGES)
    max_image: int = case_field(0, integer(0))
    bound: int = case_field(0, integer(0))
    pad: int = case_field(0, integer(0))
    offset: int = case_field(0, integer(0))
    spare: int = case_field(0, integer(0))
    replay: int = case_field(0, integer(0))
    seed: int = case_field(0, integer(0, 2**32 - 1))

    @property
    def recorded(self) -> bool:
        """Whether the inputs are those of a recorded call."""
        return self.record != "none"

    def shape(self) -> tuple[object, ...]:
        return (self.stage, self.record, self.offset, *self.batch().shape())

    def batch(self) -> V4Batch:
        """The batch whose stage it is."""
        return V4Batch(
            seq=self.seq,
            q=self.q,
            start=self.start,
            ratio=self.ratio,
            topk=self.topk,
            window=self.window,
            page=self.page,
            format=self.format,
            images=self.images,
            max_image=self.max_image,
            bound=self.bound,
            seed=self.seed,
        )

    def check(self) -> None:
        if self.stage not in STAGES:
            raise CaseError(f"v4-stages: stage is missing; accepted: {' | '.join(STAGES)}")
        if self.recorded:
            plain = V4StagesCase(stage=self.stage, record=self.record)
            if self != plain:
                raise CaseError(f"v4-stages: a recorded call is all of its inputs; write {plain}")
            return
        self.batch().check(self.suite)
        if self.stage in _COMPRESSED and self.ratio == 1:
            raise CaseError(
                f"v4-stages: stage={self.stage} is of a compressed cache; ratio is 2 up"
            )
        if self.stage in _WITHOUT_COMPRESSED and self.ratio != 1:
            raise CaseError(f"v4-stages: stage={self.stage} has no compressed cache; write ratio=1")
        for key, (stage, *others) in _KEYS_OF_STAGES.items():
            if getattr(self, key) and self.stage not in (stage, *others):
                more = f" (but for {', '.join(others)} too)" if others else ""
                raise CaseError(f"v4-stages: {key} is for stage={stage}, not {self.stage}{more}")
        if self.stage != "global_topk" and self.pad > sum(self.q):
            raise CaseError(f"v4-stages: pad={self.pad} of the batch's {sum(self.q)} tokens")
        stored = self.stage in ("gather", "quantise") and self.ratio == 1
        if self.format in WIDE_FORMATS and not stored:
            raise CaseError(
                f"v4-stages: format={self.format} is for stage=gather,ratio=1 or quantise"
            )
        entries = max((0, *self.seq)) // self.ratio
        if self.stage == "c128" and entries > self.topk:
            raise CaseError(f"v4-stages: stage=c128 lists {entries} entries in topk={self.topk}")
