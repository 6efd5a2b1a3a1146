"""The cases of ``v4-prefill``."""

from __future__ import annotations

# Each stands for its keys without seed and suite. Few heads keep the recorded results small, and
# chunks of one shape are compiled once.
_ZERO_QUERIES = (
    # vllm-project/vllm#49059: 40 rows of workspace hold one request at a time.
    "seq=40+40+16+64+0,q=0+5+0+3+0,h=16,topk=16,window=8,max_len=64,max_tokens=16,chunk=1",
    "seq=90+200+40,q=0+3+2,h=16,data=exact",
    "seq=200+40+90,q=3+2+0,h=64",
    # The longest of all has no tokens, between two that share its chunk, and of a chunk apart.
    "seq=150+1000+60,q=2+0+3,h=16,sink=mixed",
    "seq=150+1000+60,q=2+0+3,h=16,max_len=1024,max_tokens=16,chunk=1,data=flat",
    "seq=70+33+0+129+500,q=1+0+0+2+0,h=16,ratio=128,topk=8,format=bf16",
    "seq=90+40,q=0+0,h=16,sink=mixed",
    "seq=none,q=none,h=16",
)


_EDGES = (
    # The window's edge: positions 126, 127 and 128, in one request and in three.
    "seq=129,q=3,h=64,data=exact",
    "seq=127+128+129,q=1+1+1,h=16,ratio=1,data=exact",
    "seq=129+130,q=3+2,h=16,ratio=1,data=flat,page=32",
    # A prompt whole, and its later parts: 100 tokens before 28, 127 and 200 before 2.
    "seq=130,q=130,h=8,topk=16",
    "seq=128+129+202,q=28+2+2,h=16,ratio=1,page=32",
    # Shorter than the ratio, than the window, than a page; one token.
    "seq=3+100+1,q=3+1+1,h=16,ratio=128,topk=8",
    "seq=1+2+3+4,q=1+2+3+4,h=16,data=exact",
    "seq=1,q=1,h=64,ratio=1,sink=0.5",
    # No entry beside requests that have some, whose rows nothing is written to.
    "seq=3+300+2,q=3+2+2,h=16,data=exact",
    # A position that ends an entry, and lists that are just full, not full and overfull.
    "seq=256+255,q=2+2,h=16,data=exact",
    "seq=400+129,q=4+2,h=16,topk=32,data=flat",
    "seq=301+90,q=3+2,h=64,topk=33,sink=mixed",
    "seq=200+50,q=3+2,h=16,topk=1,ratio=2",
    # No slot of padding behind, and a window of 8.
    "seq=700,q=4,h=16,topk=128,data=flat",
    "seq=60+9+30,q=4+2+3,h=16,topk=8,window=8,page=32,data=exact",
)


_BATCHES = (
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=64",
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=128,data=flat,sink=mixed",
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=16,data=exact",
    # vllm-project/vllm#41834: rows of the second request, with offsets of the engine's.
    "seq=6+21,q=3+2,start=7,h=16,topk=4,window=8,data=exact",
    "seq=40+90+140+33+250+64,q=1+2+1+3+1+2,start=11,h=16,data=flat",
    "seq=66+130+97,q=4+5+3,h=16,page=32,data=exact",
    # Chunks of one and of two requests.
    "seq=420+423+421,q=3+3+3,h=16,topk=48,max_len=512,max_tokens=16,chunk=1",
    "seq=120+130+140+150,q=2+2+2+2,h=16,ratio=128,topk=4,max_len=256,max_tokens=144,chunk=1",
    "seq=301+40,q=4+3,h=16,ratio=2,topk=128,data=flat",
    "seq=150+33,q=3+2,h=64,ratio=2,topk=96,data=exact,format=bf16",
    "seq=1500+260+100,q=3+2+2,h=16,ratio=128,topk=128,data=flat",
    "seq=1030,q=3,h=128,ratio=128,topk=16,data=exact",
    "seq=4000,q=2,h=16,topk=512,data=flat,page=256",
)


_OTHERS = (
    # The host's lengths are too large: entries that the device doesn't have, rows of nobody.
    "seq=300+70+131,q=3+4+2,h=16,bound=37,data=exact",
    "seq=90+3,q=2+2,h=16,bound=4,ratio=128,topk=4",
    # Images: wider than the window, before and behind a token; overlapping; with entries.
    "seq=300+60,q=16+12,h=8,ratio=1,images=0:285-296+1:50-57,max_image=12,data=exact",
    "seq=60,q=30,h=8,topk=16,window=8,images=0:32-55,max_image=24,data=flat",
    "seq=310,q=16,h=8,images=0:296-301+0:300-307,max_image=8,sink=mixed",
    # The other plans.
    "seq=300+90+303,q=3+0+3,h=16,plan=alone,data=exact",
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=16,plan=vllm-0.33.0,sink=-inf",
    # Sinks and scores at their ends, other head counts.
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=16,sink=inf,data=flat",
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=16,sink=nan",
    "seq=300+70+5+40+129,q=3+4+5+0+2,h=16,sink=mixed,data=peaked",
    "seq=260+90,q=3+2,h=40,data=peaked,sink=mixed",
    "seq=180,q=3,h=128,format=bf16,data=peaked",
    "seq=260+31,q=2+3,h=96,format=bf16,page=32,sink=zero",
    # Windows that begin where a page does: positions 159 and 223, 191, 383.
    "seq=160+225,q=2+3,h=16,page=32,data=exact",
    "seq=192+100,q=2+2,h=16,ratio=1,format=bf16,data=exact",
    "seq=384,q=2,h=16,page=256,data=flat",
)


# What the interpreter takes by default.
INTERPRETED = (
    # Chunks of one request, of which others have no tokens.
    "v4-prefill:seq=40+40+16+64+0,q=0+5+0+3+0,topk=16,window=8,h=16,max_len=64,max_tokens=16,"
    "chunk=1",
)


# And where attention reads the pages itself: together they reach every line of the kernel's body.
FUSED_INTERPRETED = (
    # Two tiles of heads; entries and window; bit-equal.
    "v4-prefill:seq=1030,q=3,ratio=128,topk=16,h=128,data=exact,seed=34",
    # A tile of heads that isn't full; requests shorter than the ratio and than the window.
    "v4-prefill:seq=3+100+1,q=3+1+1,ratio=128,topk=8,h=16,seed=13",
)


_FULL = (
    "seq=16384+9000+127,q=512+300+64,h=128,topk=512,max_len=16384",
    "seq=16384+4097,q=256+1,h=64,topk=1024,max_len=16384,data=flat,sink=mixed",
    "seq=16384+12800,q=300+200,h=128,ratio=128,topk=128,max_len=16384,data=flat",
    "seq=8192+5000,q=200+100,h=64,ratio=2,topk=512,data=flat,format=bf16",
    "seq=16384+300,q=16+16,h=128,topk=512,max_len=16384,data=exact",
    "seq=3000+2000+0+700,q=700+0+0+300,h=64,ratio=1,page=256,plan=alone",
    "seq=2500,q=900,h=64,topk=512,images=0:1700-2200,max_image=512,data=flat",
    "seq=6000+6000+6000+6000+6000,q=64+64+64+64+64,h=64,topk=512,chunk=1,bound=64,data=peaked",
)


def lines(full: bool) -> list[str]:
    """The case lines of v4-prefill, each with a seed of its own."""
    words = enumerate([*_ZERO_QUERIES, *_EDGES, *_BATCHES, *_OTHERS, *_FULL])
    return [f"v4-prefill:{line},seed={seed}" for seed, line in words if full or line not in _FULL]
