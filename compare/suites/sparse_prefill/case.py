"""The case line of the suite ``sparse-prefill``: one call of the sparse attention kernel, or one
batch of requests executed chunk by chunk.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from compare.protocol.case import Case, CaseError, case_field, flag, integer, integers, number, word

PADDED_HEADS, PADDED_SLOTS = 64, 128
"""Multiples that kernels take, to which heads and lists are filled up before them."""

EXACT_GROUPS = 8
"""Groups of keys of data=exact; see exact.py."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsePrefillCase(Case):
    """Keys of ``sparse-prefill:...``.

    s_q, s_kv, h, d, topk: query tokens T, kv rows S, query heads H, d_qk D, top-k width K.
    q_lens, plan: with q_lens the batch of requests runs chunk by chunk under the named rules
        (``fixed`` or ``vllm-0.33.0``), s_q is their sum and isn't written; see batch.py.
    sm_scale: multiplies q.k, natural units; auto is 0.5 for data=flashmla, else d^-0.5.
    data: flashmla (FlashMLA's own test distribution), normal, flat (score spread <= 0.2), peaked,
        exact (P is 0 or 1: the output must be bit-equal).
    sink: none, mixed (finite near ln K, -inf and +inf), zero, one number for all heads, -inf,
    inf, nan.
    length: topk_length: none, ragged, full, zero, or one number for all rows.
    invalid: the share of slots that hold an out-of-range index, anywhere in the row.
    order: of a row's indices: random, sorted, dup (about half are repeats).
    empty_rows: how many token rows have no valid slot at all.
    strided: q, kv and indices are views with padded strides. poison: kv rows that no index names
    are NaN.
    seed: of the Philox streams.
    """

    suite: ClassVar[str] = "sparse-prefill"

    s_q: int = case_field(1, integer(0))
    s_kv: int = case_field(256, integer(0))
    h: int = case_field(64, integer(1, 128))
    d: int = case_field(512, word("512", "576", convert=int))
    topk: int = case_field(128, integer(1))
    q_lens: tuple[int, ...] = case_field((), integers(0))
    plan: str = case_field("none", word("none", "fixed", "vllm-0.33.0"))
    sm_scale: float | str = case_field("auto", number(None, None, "auto"))
    data: str = case_field("normal", word("flashmla", "normal", "flat", "peaked", "exact"))
    sink: float | str = case_field(
        "none", number(None, None, "none", "mixed", "zero", "-inf", "inf", "nan")
    )
    length: int | str = case_field(
        "none",
        dataclasses.replace(
            number(None, None, "none", "ragged", "full", "zero"),
            parse=lambda text: text if text in ("none", "ragged", "full", "zero") else _count(text),
            accepted="none | ragged | full | zero | a whole number from 0 to topk",
            show=str,
        ),
    )
    invalid: float = case_field(0.0, number(0.0, 1.0))
    order: str = case_field("random", word("random", "sorted", "dup"))
    empty_rows: int = case_field(0, integer(0))
    strided: bool = case_field(False, flag())
    poison: bool = case_field(True, flag())
    seed: int = case_field(0, integer(0, 2**32 - 1))

    @property
    def tokens(self) -> int:
        """T: s_q, or the sum of q_lens."""
        return sum(self.q_lens) if self.q_lens else self.s_q

    @property
    def scale(self) -> float:
        """sm_scale as a number."""
        if self.sm_scale != "auto":
            return float(self.sm_scale)
        return 0.5 if self.data == "flashmla" else self.d**-0.5

    @property
    def flop(self) -> int:
        """Multiply-adds times two of one pass over all slots: 2 T H K (D + 512)."""
        return 2 * self.tokens * self.h * self.topk * (self.d + 512)

    def shape(self) -> tuple[object, ...]:
        tokens = tuple(sorted(set(self.q_lens) - {0})) or self.tokens  # each chunk is a call
        heads, width = -(-self.h // PADDED_HEADS), -(-self.topk // PADDED_SLOTS)
        return (tokens, self.s_kv, heads, self.d, width)

    def elements(self) -> int:
        return self.tokens * self.h * (self.d + 512)

    def blocks(self, keys: int, heads: int) -> int:
        """How many blocks of `keys` slots x `heads` heads a kernel walks."""
        return -(-self.topk // keys) * -(-self.h // heads) * self.tokens

    def check(self) -> None:
        if bool(self.q_lens) != (self.plan != "none"):
            raise CaseError("sparse-prefill: q_lens and plan come together: a batch and its rules")
        if self.q_lens and self.s_q != 1:
            raise CaseError("sparse-prefill: s_q is the sum of q_lens; write one of the two")
        if isinstance(self.length, int) and self.length > self.topk:
            raise CaseError(
                f"sparse-prefill: length={self.length} exceeds topk={self.topk}; "
                "topk_length must be at most the width"
            )
        if self.empty_rows > self.tokens:
            raise CaseError(
                f"sparse-prefill: empty_rows={self.empty_rows} exceeds the {self.tokens} tokens"
            )
        if self.data == "exact" and (self.sink not in ("none", "-inf") or self.scale <= 0):
            raise CaseError(
                "sparse-prefill: data=exact takes sink none or -inf and a positive sm_scale: "
                "only then are the probabilities 0 or 1 over a power of two"
            )
        if self.data == "exact" and self.s_kv < EXACT_GROUPS:
            raise CaseError(
                f"sparse-prefill: data=exact needs s_kv >= {EXACT_GROUPS}, a row for each group of "
                f"keys; got {self.s_kv}"
            )


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
