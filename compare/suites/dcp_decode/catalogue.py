"""The cases of ``dcp-decode``."""

from __future__ import annotations

# Each stands for its keys without heads, seed and suite. First those that the fix for
# vllm-project/vllm#59065 was proven on, one request each, on both ranks; then its batches.
_PROVEN = ("lens=301,q=8", "lens=97,q=8", "lens=130,q=4", "lens=64,q=1")


_BATCHES = (
    "lens=301+97,q=8+1,h=16,world=2",
    "lens=301+97,q=8+1,h=64,world=2,rank=1,data=flat",
    "lens=301+97,q=8+1,h=6,world=2,rank=all",
    "lens=130+97,q=8+2,h=16,world=2,max_q=8",
    "lens=130+97,q=8+2,h=16,world=2,rank=1,pad_rows=6,data=exact",
    "lens=130+97,q=8+2,h=6,world=2,rank=all,pad_rows=6",
    "lens=200+150,q=3+1,h=64,world=2,rank=1",
    "lens=20+9+4,q=6+2+1,h=16,world=2",
    "lens=20+9+4,q=6+2+1,h=6,world=2,rank=all,stale=1",
)


_OTHERS = (
    # Uniform batches, with and without the group; shorter than was promised.
    "lens=300+200+65,q=4+4+4,h=16,world=2",
    "lens=257+90,q=2+2,h=64",
    "lens=129+64,q=1+1,h=16,world=2,max_q=8",
    # Ragged on one rank; a request without tokens inside and at the end, padding behind.
    "lens=500+33+129,q=1+5+2,h=16,data=flat",
    "lens=130+40+97+0,q=8+0+8+0,h=6,world=2,rank=1,pad_rows=8,stale=1",
    "lens=0+0,q=0+0,h=16,world=2,pad_rows=4",
    # Worlds of 4 and 8, runs of 4 and 64.
    "lens=2050+77,q=4+1,h=16,world=4,rank=3,data=flat",
    "lens=4100,q=2,h=16,world=8,rank=5,interleave=4,data=flat,stale=1",
    "lens=1027+300,q=8+3,h=16,world=2,rank=1,interleave=64,data=exact",
    "lens=700+515,q=5+1,h=6,world=4,rank=all,interleave=64",
    "lens=333+64,q=3+2,h=16,world=4,rank=all,interleave=4,data=flat",
    "lens=900+130,q=8+2,h=16,world=8,rank=all,data=exact",
    # Ranks without keys: of one request, of all; the first of 8 ranks has the only key.
    "lens=3+300,q=1+2,h=64,world=8,rank=5",
    "lens=100+2,q=4+1,h=16,world=4,rank=2,interleave=64",
    "lens=1+2,q=1+1,h=16,world=8,rank=7",
    "lens=3,q=1,h=6,world=8,rank=all,stale=1",
    # Fewer keys than tokens: bounds below 1.
    "lens=1+2+40,q=4+3+8,h=16",
    "lens=1+5,q=4+8,h=16,world=2,rank=1,pad_rows=1",
    # A draft block: every token sees all.
    "lens=210+35,q=4+4,h=16,world=2,rank=1,causal=0",
    # Other data: exact at the ends of blocks and pages, peaked, flat over many keys.
    "lens=128+65,q=1+1,h=64,data=exact,stale=1",
    "lens=519,q=8,h=128,world=2,data=exact",
    "lens=260+100,q=3+4,h=16,world=2,data=peaked",
    "lens=3000,q=2,h=128,data=flat",
    "lens=1500+700,q=1+8,h=16,world=2,rank=1,data=flat,stale=1",
    "lens=193,q=2,h=24,world=2,rank=1,sm_scale=0.0721687836487032",
    "lens=161+70,q=2+5,h=96,world=2",
    # Pages of 32 and 128, and float8 keys, which FlashMLA doesn't take.
    "lens=301+70,q=8+2,h=16,page=32,world=2,rank=1,stale=1",
    "lens=300+129,q=1+4,h=16,page=128,world=2,data=flat",
    "lens=1030+150,q=3+1,h=16,page=128,world=2,rank=all,interleave=64,data=exact",
    "lens=301+97,q=8+1,h=16,world=2,kv=e4m3",
    "lens=640+200,q=2+5,h=64,world=2,rank=1,kv=e4m3,data=flat,stale=1",
    "lens=300+140,q=4+1,h=6,world=4,rank=all,kv=e4m3,data=exact",
)


# Both sides float8. Numbered after all others, whose seeds stay what they were.
_FLOAT8_QUERIES = (
    "lens=301+97,q=8+1,h=16,world=2,rank=1,kv=e4m3,q_dtype=e4m3,data=flat,stale=1",
    "lens=200+130,q=4+2,h=6,world=2,rank=all,kv=e4m3,q_dtype=e4m3,pad_rows=1",
)


# Each holds several things that no case above has; numbered after those too.
_CORNERS = (
    # One rank: 3100 keys, and a number of keys that is a multiple of 1024.
    "lens=3100+1024,q=2+1,h=6,data=flat,stale=1",
    # 4 ranks in turns: over 600 keys each, of which the last haven't come; 16 tokens.
    "lens=2700+1030,q=3+16,h=6,world=4,rank=1,missing=3,data=flat",
    # 3 ranks, merged; a request without tokens.
    "lens=90+70+40,q=16+0+3,h=6,world=3,rank=all,pad_rows=1",
    # A ragged draft block in runs.
    "lens=214+95,q=3+1,h=6,world=2,rank=1,interleave=4,causal=0",
    # Float8 keys of one rank under a scale that bfloat16 doesn't hold, pages of 128, a draft block.
    "lens=300+130,q=3+1,h=128,page=128,kv=e4m3,kv_scale=0.0131,causal=0",
    # A NaN in a query; in a key, on one of the ranks that are merged.
    "lens=97+40,q=2+1,h=6,world=2,rank=1,nan=q",
    "lens=97+70,q=1+2,h=6,world=2,rank=all,nan=key",
    # Scales that turn the order of scores round, and that make them all equal.
    "lens=97+130,q=8+2,h=16,world=2,rank=1,sm_scale=-0.04",
    "lens=300+40,q=3+1,h=6,world=2,rank=all,sm_scale=0.0",
)


# What the interpreter takes by default.
INTERPRETED = (
    # A batch that isn't uniform, rows of padding behind it; bit-equal.
    "dcp-decode:lens=130+97,q=8+2,world=2,rank=1,pad_rows=6,data=exact,seed=12",
    # Many blocks of one request: thread blocks share its keys, and their results are merged.
    "dcp-decode:lens=4100,q=2,world=8,rank=5,interleave=4,stale=1,data=flat,seed=24",
    # Float8 keys, and float8 on both sides.
    "dcp-decode:lens=301+97,q=8+1,world=2,kv=e4m3,seed=46",
    "dcp-decode:lens=301+97,q=8+1,world=2,rank=1,kv=e4m3,q_dtype=e4m3,stale=1,data=flat,seed=58",
)


# With --full: what serving looks like, and the shapes that the bench times.
_FULL = (
    "lens=8192+8191+4097+513,q=8+1+4+2,h=128,world=2,rank=1",
    "lens=16384+9000+127,q=8+3+1,h=16,world=4,rank=2,data=flat",
    "lens=16384+9000+127,q=8+3+1,h=16,world=4,rank=all,data=flat,stale=1",
    "lens=4096+4096+4096+4096,q=2+2+2+2,h=128,data=normal",
    "lens=65536,q=8,h=16,world=8,rank=all,interleave=64,data=exact",
    "lens=32768+31,q=1+8,h=64,world=8,rank=3,interleave=4,data=flat",
    "lens=12000+300,q=16+5,h=48,world=2,rank=1,data=peaked",
    "lens=10000+7000,q=8+2,h=64,page=128,world=2,kv=e4m3,data=flat",
    "lens=10000+7000,q=8+2,h=24,page=32,world=4,rank=all,kv=e4m3,stale=1",
)


def lines(full: bool) -> list[str]:
    """The case lines of dcp-decode, each with a seed of its own."""
    proven = [
        f"{words},h={heads},world=2,rank={rank}"
        for words, heads in zip(_PROVEN, (128, 64, 16, 128), strict=True)
        for rank in (0, 1)
    ]
    words = enumerate([*proven, *_BATCHES, *_OTHERS, *_FULL, *_FLOAT8_QUERIES, *_CORNERS])
    return [f"dcp-decode:{line},seed={seed}" for seed, line in words if full or line not in _FULL]
