"""Two planners of decode rows written apart from each other: on 20,000 random batches they agree,
obey the judge's rules, share out every key once, and equal the shipped rows on uniform batches.
"""

from __future__ import annotations

import random
from itertools import accumulate

import jax_impl.planning as ours
from compare.judging.decode_plan_rules import violations
from compare.judging.plans import DecodePlanInputs, DecodePlanResult
from torch_ref import planning as reference

BATCHES = 20_000


def random_batch(draw: random.Random) -> DecodePlanInputs:
    """Up to 6 requests of 0 to 8 tokens, in many batches all of one length; some have fewer keys
    than tokens, some batches padded rows, some as many as make up for missing tokens.
    """
    promised = draw.randint(1, 8)
    requests = draw.randrange(7)
    uniform = draw.random() < 0.3
    each = draw.choice((promised, promised, draw.randint(0, promised)))
    q = [each if uniform else draw.randint(0, promised) for _ in range(requests)]
    if draw.random() < 0.2:
        q += [0] * draw.randint(1, 2)
    total = [draw.choice((draw.randrange(9), draw.randrange(200), count)) for count in q]
    short = len(q) * promised - sum(q)
    world = draw.choice((1, 2, 2, 3, 4, 8))
    return DecodePlanInputs(
        query_start_loc=(0, *accumulate(q)),
        total_lens=tuple(total),
        max_query_len=promised,
        causal=draw.random() < 0.85,
        num_rows=sum(q) + draw.choice((0, 0, short, draw.randrange(5))),
        dcp_rank=draw.randrange(world),
        dcp_world=world,
        interleave=draw.choice((1, 1, 2, 4, 64)),
    )


def planned(planner, batch: DecodePlanInputs, **rules) -> tuple[DecodePlanResult, list[int]]:
    """The planner's plan, and each row's keys summed over all ranks."""
    rows = planner.decode_rows(
        batch.query_start_loc,
        batch.total_lens,
        max_query_len=batch.max_query_len,
        causal=batch.causal,
        num_rows=batch.num_rows,
        **rules,
    )
    counts = []
    for rank in range(batch.dcp_world):
        shard = {
            "dcp_rank": rank,
            "dcp_world": batch.dcp_world,
            "interleave": batch.interleave,
        }
        lens = planner.local_seq_lens(batch.total_lens, **shard)
        counts.append([int(n) for n in planner.local_key_counts(rows, lens, **shard)])
    real = batch.query_start_loc[-1]
    flags = rows.padding
    if isinstance(flags, int):
        flags = [t >= batch.num_rows - flags for t in range(batch.num_rows)]
    plan = DecodePlanResult(
        ragged=rows.ragged,
        # What padded rows name is nobody's business.
        request=tuple(int(i) if t < real else -1 for t, i in enumerate(rows.request)),
        bound=tuple(int(b) if t < real else 0 for t, b in enumerate(rows.bound)),
        local_counts=tuple(counts[batch.dcp_rank]),
        padding=tuple(flags),
    )
    return plan, [sum(column) for column in zip(*counts, strict=True)]


def test_the_planners_agree_obey_the_rules_and_share_out_every_key() -> None:
    draw = random.Random(20_261_201)
    ragged = uniform = padded = sharded = 0
    for _ in range(BATCHES):
        batch = random_batch(draw)
        plan, keys = planned(ours, batch)
        assert (plan, keys) == planned(reference, batch), batch
        assert not violations(batch, plan), batch
        assert keys == [max(bound, 0) for bound in plan.bound], batch
        real = batch.query_start_loc[-1]
        full = real == batch.max_query_len * len(batch.total_lens)
        if batch.causal and full and batch.num_rows == real > 0:
            shipped, _ = planned(reference, batch, rules="vllm-0.33.0")
            assert shipped == plan, batch
            uniform += 1
        ragged += plan.ragged
        padded += batch.num_rows > real
        sharded += batch.dcp_world > 1 and batch.interleave > 1
    # The batches are what the test is named after.
    assert min(ragged, padded, sharded) > BATCHES // 5
    assert uniform > BATCHES // 20


def test_each_position_has_one_owner_in_both_and_comes_back() -> None:
    draw = random.Random(20_261_202)
    for _ in range(2_000):
        world, interleave = draw.choice((1, 2, 3, 4, 8)), draw.choice((1, 2, 4, 64))
        position = draw.choice((draw.randrange(200), draw.randrange(1 << 40)))
        group = {"dcp_world": world, "interleave": interleave}
        rank = reference.owner_rank(position, **group)
        local = reference.local_position(position, **group)
        assert ours.owner(position, **group) == rank
        assert ours.local_index(position, **group) == local
        back = [
            planner.global_position(local, dcp_rank=r, **group)
            for planner in (ours, reference)
            for r in range(world)
        ]
        assert back.count(position) == 2  # one rank's, in each
        assert int(back[rank]) == position == int(back[world + rank])
