"""The case line of the suite ``prefill-plan``: one batch of prefill requests to be cut into
chunks.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.protocol.case import Case, CaseError, case_field, integer, integers, word


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlanCase(Case):
    """Keys of ``prefill-plan:...`` (all lengths in tokens).

    seq, q: seq_lens and query_lens of the prefill requests, in batch order; q may hold zeros.
    ratio: compress_ratio. window: sliding window. max_len: max_model_len.
    max_tokens: max_num_batched_tokens. chunk: PREFILL_CHUNK_SIZE.
    compressed: whether a compressed region exists; auto is ratio > 1.
    """

    suite: ClassVar[str] = "prefill-plan"

    seq: tuple[int, ...] = case_field((), integers(0))
    q: tuple[int, ...] = case_field((), integers(0))
    ratio: int = case_field(4, integer(0))
    window: int = case_field(128, integer(1))
    max_len: int = case_field(8192, integer(1))
    max_tokens: int = case_field(2048, integer(1))
    chunk: int = case_field(4, integer(1))
    compressed: bool | None = case_field(
        None,
        word(
            "auto",
            "0",
            "1",
            convert=lambda text: None if text == "auto" else text == "1",
            show=lambda value: "auto" if value is None else str(int(value)),
        ),
    )

    def check(self) -> None:
        if len(self.seq) != len(self.q):
            raise CaseError(
                f"prefill-plan: seq has {len(self.seq)} requests and q has {len(self.q)}; "
                "one number for each request in both"
            )
        for i, (seq_len, query_len) in enumerate(zip(self.seq, self.q, strict=True)):
            if query_len > seq_len:
                raise CaseError(
                    f"prefill-plan: request {i} has q={query_len} tokens of seq={seq_len}; "
                    "seq counts this step's tokens too"
                )
