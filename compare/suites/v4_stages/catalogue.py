"""The cases of ``v4-stages``."""

from __future__ import annotations

from compare.suites.v4_stages.make import RECORDED

_STAGES = (
    "stage=combine,seq=300+70+5+40+129,q=3+4+5+0+2",
    "stage=combine,seq=3+300+2,q=3+2+2,start=9,ratio=128,topk=8",
    "stage=combine,seq=127+128+129,q=1+1+1,ratio=1",
    "stage=combine,seq=256+255,q=2+2,bound=37",
    "stage=combine,seq=700,q=4,topk=128",
    "stage=combine,seq=300+60,q=20+12,images=0:285-296+1:50-57,max_image=12,ratio=1",
    "stage=combine,seq=60,q=30,topk=16,window=8,images=0:32-55+0:50-57,max_image=24",
    "stage=global_topk,seq=300+70+5,q=3+4+5,pad=3",
    "stage=global_topk,seq=1500+260+100,q=1+1+2,ratio=128,topk=128",
    "stage=global_topk,seq=301+40,q=4+3,ratio=2,topk=33",
    "stage=gather,seq=300+70+5+40+129,q=3+4+5+0+2,ratio=1,offset=5,spare=3",
    "stage=gather,seq=300+70,q=3+4,ratio=1,page=32,format=bf16",
    "stage=gather,seq=300+70+5+2,q=3+4+5+0,ratio=4,spare=2",
    "stage=gather,seq=1500+260+100,q=3+2+2,ratio=128,offset=1",
    "stage=gather,seq=301+40,q=4+3,ratio=2,format=bf16",
    "stage=gather,seq=900,q=300,ratio=1,page=256,window=512",
    # The lines of one stage have the same shapes, so that they are one program of XLA's.
    "stage=paged_swa,seq=300+70+5+40,q=3+4+5+0,start=7,ratio=1,max_image=12,pad=3,spare=2",
    "stage=paged_swa,seq=160+60+90+130,q=9+3+1+1,ratio=1,window=120,page=32,"
    "images=0:152-158+1:57-59,max_image=12,replay=40",
    "stage=c128,seq=1500+260+100+255,q=1+3+1+2,start=5,ratio=128,topk=12,pad=2",
    "stage=c128,seq=1536+127+128+129,q=2+1+2+2,ratio=128,topk=12",
    "stage=dspark,seq=300+70+5+128,q=5+4+5+0,start=3,ratio=1,pad=2,spare=3",
    "stage=dspark,seq=160+70+33+129,q=7+3+3+1,ratio=1,window=122,page=32,spare=3",
    "stage=gather,seq=70+40,q=3+4,ratio=1,window=32,page=32,format=v3.2-fp8,offset=1,spare=2",
    "stage=gather,seq=70+37,q=1+6,ratio=1,window=33,page=32,format=v3.2-fp8,spare=1",
    "stage=gather,seq=70+40,q=3+4,ratio=1,window=32,page=32,format=bf16-576,spare=3",
    "stage=gather,seq=70+37,q=1+6,ratio=1,window=33,page=32,format=bf16-576,offset=1",
    "stage=quantise,seq=70+40,q=30+12,ratio=1,page=32,pad=3",
    "stage=quantise,seq=70+40,q=30+12,ratio=1,page=32,format=v3.2-fp8,pad=3",
)


# What the interpreter takes by default.
INTERPRETED = (
    # A page's edge, in both formats of V4; pages of two entries, a first row that isn't 0.
    "v4-stages:stage=gather,seq=300+70,q=3+4,ratio=1,page=32,format=bf16,seed=11",
    "v4-stages:stage=gather,seq=1500+260+100,q=3+2+2,ratio=128,offset=1,seed=13",
    # Scales that are no powers of two, and rows of 576.
    "v4-stages:stage=gather,seq=70+40,q=3+4,ratio=1,window=32,page=32,format=v3.2-fp8,offset=1,"
    "spare=2,seed=22",
)


def lines(full: bool) -> list[str]:
    """The case lines of v4-stages: the recorded calls, then those made from a batch."""
    from compare.goldens import files

    made = [f"v4-stages:{line},seed={seed}" for seed, line in enumerate(_STAGES)]
    return [*files.golden_cases(RECORDED), *made]
