"""What every batch of decode must fulfil."""

from __future__ import annotations

from compare.protocol.case import (
    CaseError,
)


def check_batch(
    suite: str,
    lens: tuple[int, ...],
    q: tuple[int, ...],
    promised: int,
    world: int,
    rank: int | str,
) -> None:
    """What every case of decode must fulfil; CaseError."""
    if len(lens) != len(q):
        raise CaseError(
            f"{suite}: lens has {len(lens)} requests and q has {len(q)}; "
            "one number for each request in both"
        )
    for i, queries in enumerate(q):
        if queries > promised:
            raise CaseError(
                f"{suite}: request {i} has q={queries} tokens and max_q={promised}; "
                "max_q is a promise that holds for every request"
            )
    if rank != "all" and int(rank) >= world:
        raise CaseError(f"{suite}: rank={rank} of world={world}; accepted are 0 to {world - 1}")
