"""The rules P1 to P7 of a prefill plan, as arithmetic on its chunks; docs/planning-rules.md.

Written from the rules and not from a planner. Two plans are built from them, greedily: the shipped
one, which every plan must equal where no request is without query tokens (P5), and the fixed one.
No implementation is asked: the planners of both houses are candidates.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from compare.generate.v4_batch import gathered_positions
from compare.judging.plans import PlanChunk, PrefillPlanInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """A broken rule: P1..P7, or "form" where a chunk isn't one. chunk: its number."""

    rule: str
    chunk: int | None
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the rules need of a batch: comp_i and gather_i of each request and the area limit, all
    in workspace rows, and the first token of each request.
    """

    compressed: tuple[int, ...]
    gather: tuple[int, ...]
    limit: int
    first_token: tuple[int, ...]

    def area(self, start: int, end: int) -> int:
        """(e - s) * (max comp + max gather) of the requests [start, end)."""
        return (end - start) * (max(self.compressed[start:end]) + max(self.gather[start:end]))

    def chunk(self, start: int, end: int) -> PlanChunk:
        """The requests [start, end) as a chunk."""
        N = max(self.compressed[start:end])
        return PlanChunk(
            start=start,
            end=end,
            compressed_rows=N,
            workspace_rows=N + max(self.gather[start:end]),
            query_start=self.first_token[start],
            query_end=self.first_token[end],
        )


def sizes(inputs: PrefillPlanInputs) -> Sizes:
    """comp = floor(seq / ratio), gather by gathered_positions, and
    A_max = chunk_size (ceil(max_model_len / ratio) + window + max_num_batched_tokens); without a
    compressed region (ratio <= 1 unless has_compressed says so) its two terms are 0.
    """
    ratio, window = inputs.compress_ratio, inputs.window
    has_compressed = ratio > 1 if inputs.has_compressed is None else inputs.has_compressed
    pairs = list(zip(inputs.seq_lens, inputs.query_lens, strict=True))
    most = -(-inputs.max_model_len // ratio) if has_compressed else 0
    return Sizes(
        compressed=tuple(seq // ratio if has_compressed else 0 for seq, _ in pairs),
        gather=tuple(gathered_positions(seq, q, window) for seq, q in pairs),
        limit=inputs.chunk_size * (most + window + inputs.max_num_batched_tokens),
        first_token=(0, *accumulate(q for _, q in pairs)),
    )


def violations(inputs: PrefillPlanInputs, chunks: tuple[PlanChunk, ...]) -> list[Violation]:
    """Every broken rule, in the order of the chunks."""
    broken = [v for i, chunk in enumerate(chunks) for v in _form(inputs, i, chunk)]
    if broken:
        return broken
    known = sizes(inputs)
    for i, chunk in enumerate(chunks):
        broken += _zeros(inputs, i, chunk)
        broken += _workspace(known, i, chunk)
        broken += _needless_split(inputs, known, i, chunk)
    broken += _coverage(inputs, chunks)
    if all(inputs.query_lens) and not broken:
        broken += _equals_shipped(inputs, chunks)
    return broken


def shipped_plan(inputs: PrefillPlanInputs) -> tuple[PlanChunk, ...]:
    """The greedy plan over all requests, zero-query ones included, as vLLM 0.33.0 makes it."""
    return _greedy(inputs, range(len(inputs.query_lens)))


def fixed_plan(inputs: PrefillPlanInputs) -> tuple[PlanChunk, ...]:
    """The greedy plan over the requests with query tokens: each chunk begins and ends with one, and
    those without that lie between count in its sizes.
    """
    return _greedy(inputs, [r for r, queries in enumerate(inputs.query_lens) if queries])


def alone_plan(inputs: PrefillPlanInputs) -> tuple[PlanChunk, ...]:
    """Each request with query tokens as a chunk of its own."""
    known = sizes(inputs)
    return tuple(known.chunk(r, r + 1) for r, queries in enumerate(inputs.query_lens) if queries)


def _greedy(inputs: PrefillPlanInputs, members: Sequence[int]) -> tuple[PlanChunk, ...]:
    """Chunks that begin and end with a member, each as long as its area allows."""
    known = sizes(inputs)
    plan: list[PlanChunk] = []
    left = collections.deque(members)
    while left:
        start = left.popleft()
        end = start + 1
        while left and known.area(start, left[0] + 1) <= known.limit:
            end = left.popleft() + 1
        plan.append(known.chunk(start, end))
    return tuple(plan)


def _named(i: int, chunk: PlanChunk) -> str:
    span = f"request {chunk.start}" if chunk.end == chunk.start + 1 else ""
    return f"chunk {i} ({span or f'requests {chunk.start} to {chunk.end - 1}'})"


def _form(inputs: PrefillPlanInputs, i: int, chunk: PlanChunk) -> list[Violation]:
    """The range lies in the batch and the token range is that of its requests."""
    n = len(inputs.query_lens)

    def say(sentence: str) -> list[Violation]:
        return [Violation(rule="form", chunk=i, sentence=sentence)]

    if not 0 <= chunk.start < chunk.end <= n:
        return say(
            f"chunk {i} has the requests [{chunk.start}, {chunk.end}) of {n}; a chunk is a "
            "range of at least one request"
        )
    first = (0, *accumulate(inputs.query_lens))
    right = (first[chunk.start], first[chunk.end])
    if (chunk.query_start, chunk.query_end) != right:
        return say(
            f"{_named(i, chunk)} has the tokens [{chunk.query_start}, {chunk.query_end}); its "
            f"requests have [{right[0]}, {right[1]})"
        )
    return []


def _zeros(inputs: PrefillPlanInputs, i: int, chunk: PlanChunk) -> list[Violation]:
    """P1, P3 and P4: what requests without query tokens may not do."""
    queries = inputs.query_lens
    if not any(queries[chunk.start : chunk.end]):
        aborts = (
            f"{_named(i, chunk)} has no query token, its range is [{chunk.query_start}, "
            f"{chunk.query_end}): FlashMLA aborts on it, s_q = 0"
        )
        broken = [Violation(rule="P1", chunk=i, sentence=aborts)]
        if not any(queries[chunk.start :]):
            after = f"{_named(i, chunk)} holds trailing requests without query tokens alone"
            broken.append(Violation(rule="P4", chunk=i, sentence=after))
        return broken
    if queries[chunk.start] == 0:
        sentence = f"{_named(i, chunk)} begins with request {chunk.start}, which has no query token"
        return [Violation(rule="P3", chunk=i, sentence=sentence)]
    return []


def _workspace(known: Sizes, i: int, chunk: PlanChunk) -> list[Violation]:
    """P6: every request of the range fits, and all together stay within the area, which only a
    request that needs more by itself may exceed."""
    broken = []
    N, G = chunk.compressed_rows, chunk.workspace_rows - chunk.compressed_rows
    for what, rows, need in (
        ("compressed", N, known.compressed),
        ("window and query", G, known.gather),
    ):
        short = [r for r in range(chunk.start, chunk.end) if need[r] > rows]
        if short:
            broken.append(
                Violation(
                    rule="P6",
                    chunk=i,
                    sentence=f"{_named(i, chunk)} has {rows} {what} rows for each request, and "
                    f"request {short[0]} gathers {need[short[0]]}: they spill into the next "
                    "request's rows",
                )
            )
    count = chunk.end - chunk.start
    allowed = known.limit if count > 1 else max(known.limit, known.area(chunk.start, chunk.end))
    if count * chunk.workspace_rows > allowed:
        broken.append(
            Violation(
                rule="P6",
                chunk=i,
                sentence=f"{_named(i, chunk)} takes {count} x {chunk.workspace_rows} workspace "
                f"rows, allowed are {allowed}",
            )
        )
    return broken


def _needless_split(
    inputs: PrefillPlanInputs, known: Sizes, i: int, chunk: PlanChunk
) -> list[Violation]:
    """P7: the next request with tokens didn't fit, or a request without tokens lies between."""
    queries = inputs.query_lens
    members = [r for r in range(chunk.start, chunk.end) if queries[r] > 0]
    later = [r for r in range(chunk.end, len(queries)) if queries[r] > 0]
    if not members or not later or later[0] != members[-1] + 1:
        return []
    area = known.area(chunk.start, later[0] + 1)
    if area > known.limit:
        return []
    return [
        Violation(
            rule="P7",
            chunk=i,
            sentence=f"{_named(i, chunk)} ends before request {later[0]}, which fits: "
            f"{area} workspace rows of {known.limit}",
        )
    ]


def _coverage(inputs: PrefillPlanInputs, chunks: tuple[PlanChunk, ...]) -> list[Violation]:
    """P2: ascending, disjoint, and every request with query tokens in exactly one chunk."""
    broken = []
    for i in range(1, len(chunks)):
        if chunks[i].start < chunks[i - 1].end:
            sentence = (
                f"{_named(i, chunks[i])} begins before chunk {i - 1} ends, at request "
                f"{chunks[i - 1].end}"
            )
            broken.append(Violation(rule="P2", chunk=i, sentence=sentence))
    covered = {r for chunk in chunks for r in range(chunk.start, chunk.end)}
    missing = [r for r, q in enumerate(inputs.query_lens) if q > 0 and r not in covered]
    if missing:
        which = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        sentence = f"no chunk has request {which} with {inputs.query_lens[missing[0]]} query tokens"
        broken.append(Violation(rule="P2", chunk=None, sentence=sentence))
    return broken


def _equals_shipped(inputs: PrefillPlanInputs, chunks: tuple[PlanChunk, ...]) -> list[Violation]:
    """P5: no request is without query tokens, so the plan is the shipped one."""
    right = shipped_plan(inputs)
    if chunks == right:
        return []
    i = next(
        (i for i, pair in enumerate(zip(chunks, right, strict=False)) if pair[0] != pair[1]), 0
    )
    return [
        Violation(
            rule="P5",
            chunk=i,
            sentence=f"{_named(i, chunks[i])} has N = {chunks[i].compressed_rows} and "
            f"M = {chunks[i].workspace_rows}; without zero-query requests the shipped rules "
            f"hold and give N = {right[i].compressed_rows} and M = {right[i].workspace_rows}",
        )
    ]


RULE_NAMES = {
    "form": "chunk-range",
    "P1": "empty-chunk",
    "P2": "request-coverage",
    "P3": "zero-query-first",
    "P4": "trailing-chunk",
    "P5": "not-the-shipped-plan",
    "P6": "workspace-size",
    "P7": "needless-split",
}
"""The diagnosis of a broken rule."""
