"""The cases of ``decode-plan``."""

from __future__ import annotations

import numpy as np

_PLANS = (
    "lens=301,q=8",
    "lens=97,q=8,rank=1",
    "lens=130,q=4",
    "lens=64,q=1,rank=1",
    "lens=301+97,q=8+1",
    "lens=301+97,q=8+1,max_q=8,rank=1",
    "lens=130+97,q=8+2",
    "lens=130+97,q=8+2,pad_rows=6",
    "lens=200+150,q=3+1",
    "lens=20+9+4,q=6+2+1",
    "lens=20+9+4,q=6+2+1,world=1",
    "lens=300+200,q=4+4",
    "lens=300+200,q=4+4,pad_rows=4",
    "lens=129+64,q=1+1,max_q=8",
    "lens=9+8+30,q=1+1+8",
    "lens=12+7,q=2+2,rank=1",
    "lens=130+40+97,q=8+0+8,pad_rows=8",
    "lens=130+97+0,q=8+8+0,pad_rows=8",
    "lens=130+0+97,q=4+0+4,max_q=4",
    "lens=0+0,q=0+0,pad_rows=4",
    "lens=none,q=none",
    "lens=1+2+40,q=4+3+8",
    "lens=3,q=1,world=8,rank=5",
    "lens=17,q=3,causal=0",
    "lens=17+9,q=3+3,causal=0,rank=1,pad_rows=3",
    "lens=17+9,q=3+1,causal=0",
    "lens=16,q=8,world=2",
    "lens=1030+515,q=8+2,world=4,rank=3,interleave=64",
    "lens=4100+3,q=5+3,world=8,rank=7,interleave=4",
)


_RANDOM_PLANS = 32

_RANDOM_STREAM = 0x706C616E  # a Philox key of its own, apart from the inputs' streams


def lines(full: bool) -> list[str]:
    """The case lines of decode-plan: written by hand, and as many drawn at random."""
    drawn = [_drawn(number) for number in range(_RANDOM_PLANS)]
    return [f"decode-plan:{words}" for words in (*_PLANS, *drawn)]


def _drawn(number: int) -> str:
    """A batch by its number: the same on every machine, since only whole numbers are drawn."""
    words = np.random.Philox(key=np.array([number, _RANDOM_STREAM], np.uint64)).random_raw(32)
    draw = iter(int(word >> np.uint64(32)) for word in words)
    requests = 1 + next(draw) % 6
    most = (1, 4, 8, 16)[next(draw) % 4]
    uniform = next(draw) % 4 == 0
    q = [most if uniform else next(draw) % (most + 1) for _ in range(requests)]
    # Mostly more keys than tokens, now and then fewer.
    lens = [next(draw) % 600 + (tokens if next(draw) % 8 else 0) for tokens in q]
    world = (1, 2, 3, 4, 8)[next(draw) % 5]
    rank, interleave = next(draw) % world, (1, 1, 4, 64)[next(draw) % 4]
    padding, causal = (0, 0, most, 3)[next(draw) % 4], int(next(draw) % 5 > 0)
    return (
        f"lens={'+'.join(map(str, lens))},q={'+'.join(map(str, q))},max_q={most},world={world},"
        f"rank={rank},interleave={interleave},causal={causal},pad_rows={padding}"
    )
