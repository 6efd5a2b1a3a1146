"""A batch of requests executed chunk by chunk, as a serving engine does: query ranges of its plan.

The batch is the smallest setting in which each request fills a chunk of its own: every request
has 64 tokens of context, compress ratio 4 (16 compressed rows), window 8 and chunk size 1, so
that the budget is 16 + 8 + 16 = 40 rows and no two requests (at least 2 x 23 rows) share a chunk.
Under the shipped rules a request without query tokens then becomes a chunk without query tokens.
"""

from __future__ import annotations

from compare.judging.plan_rules import fixed_plan, shipped_plan
from compare.judging.plans import PrefillPlanInputs

CONTEXT = 64


def plan_inputs(q_lens: tuple[int, ...]) -> PrefillPlanInputs:
    """The planner's arguments of the batch."""
    return PrefillPlanInputs(
        seq_lens=tuple(max(CONTEXT, q_len) for q_len in q_lens),
        query_lens=q_lens,
        compress_ratio=4,
        window=8,
        max_model_len=CONTEXT,
        max_num_batched_tokens=16,
        chunk_size=1,
    )


def query_ranges(q_lens: tuple[int, ...], rules: str) -> tuple[tuple[int, int], ...]:
    """The (query_start, query_end) of each chunk under rules `fixed` or `vllm-0.33.0`."""
    plan = {"fixed": fixed_plan, "vllm-0.33.0": shipped_plan}[rules](plan_inputs(q_lens))
    return tuple((chunk.query_start, chunk.query_end) for chunk in plan)
