"""The cases of ``sparse-prefill``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

HEADS = (64, 128)


WIDTHS = (512, 576)


# Each line runs with both head counts and both d_qk; small enough for two CPU cores and, all but a
# few, for the kernel interpreter.
_EVERYWHERE = (
    "s_q=3,s_kv=300,topk=128",
    "s_q=2,s_kv=512,topk=256,sink=mixed,length=ragged,invalid=0.2",
    "s_q=2,s_kv=1024,topk=640,data=flat,invalid=0.1",
    "s_q=1,s_kv=4096,topk=2048,data=flat,length=ragged",
    "s_q=3,s_kv=700,topk=512,data=exact,length=ragged,invalid=0.3,empty_rows=1",
    "s_q=4,s_kv=200,topk=128,sink=mixed,order=dup,empty_rows=2",
    "s_q=2,s_kv=600,topk=384,data=peaked,sink=mixed,order=sorted",
    "s_q=2,s_kv=2048,topk=1024,data=flashmla,sink=mixed,length=ragged",
    "s_q=2,s_kv=95,topk=512,data=flashmla,sink=mixed",
    "s_q=2,s_kv=1300,topk=1024,data=flat,sink=mixed,invalid=0.5",
)


_ONCE = (
    "q_lens=0+5+0+3+0,plan=fixed,s_kv=300,h=64,d=512,topk=128,sink=mixed,length=ragged",
    "q_lens=0+5+0+3+0,plan=fixed,s_kv=300,h=128,d=576,topk=256,data=flat,invalid=0.2",
    "q_lens=2+0+0+1,plan=fixed,s_kv=300,h=128,d=512,topk=128,data=exact",
    "s_q=2,s_kv=300,h=64,d=576,topk=128,length=zero,sink=mixed",
    "s_q=2,s_kv=300,h=128,d=512,topk=128,length=1",
    "s_q=2,s_kv=300,h=64,d=512,topk=256,data=flat,length=63",
    "s_q=2,s_kv=300,h=64,d=576,topk=256,data=flat,length=64",
    "s_q=2,s_kv=300,h=128,d=512,topk=256,data=flat,length=65",
    "s_q=2,s_kv=300,h=128,d=576,topk=256,data=exact,length=129",
    "s_q=2,s_kv=300,h=64,d=512,topk=128,sink=inf,empty_rows=1",
    "s_q=2,s_kv=300,h=64,d=512,topk=128,sink=-inf",
    "s_q=2,s_kv=300,h=64,d=576,topk=128,sink=nan,empty_rows=1",
    "s_q=2,s_kv=300,h=128,d=576,topk=128,sink=mixed,length=ragged,invalid=0.1,strided=1",
    "s_q=2,s_kv=300,h=16,d=512,topk=133,data=flat,sink=mixed",
    "s_q=2,s_kv=300,h=96,d=576,topk=192,length=ragged",
    "s_q=1,s_kv=4096,h=128,d=576,topk=2048,data=exact,invalid=0.2",
)


# What the interpreter takes by default. Together they reach every line and every outcome of the
# kernel's branches that all of its cases reach.
INTERPRETED = (
    # Two tiles of heads, the second one not full; a list that is filled up; lengths anywhere.
    "sparse-prefill:s_q=2,s_kv=300,h=96,d=576,topk=192,length=ragged",
    # The same programs: bit-equal, with a length that ends in the middle of a block.
    "sparse-prefill:s_q=2,s_kv=300,h=128,d=576,topk=256,data=exact,length=129",
    # Several pairs of blocks with holes in the lists, and a row without a key.
    "sparse-prefill:s_q=3,s_kv=700,topk=512,data=exact,length=ragged,invalid=0.3,empty_rows=1,"
    "seed=16",
    # One pair of blocks, nothing in it, and a sink.
    "sparse-prefill:s_q=2,s_kv=300,d=576,sink=mixed,length=zero",
)


# FlashMLA's own test matrix: (s_kv, topk) and token counts.
_FLASHMLA_SHAPES = (
    (128, 128),
    (256, 256),
    (512, 512),
    (592, 128),
    (1840, 256),
    (1592, 384),
    (1521, 512),
    (95, 128),
    (153, 256),
    (114, 384),
)


_FLASHMLA_TOKENS = (1, 62, 213)


_FLASHMLA_CORNERS = (
    "s_q=1,s_kv=128,topk=128,invalid=1.0",
    "s_q=1,s_kv=256,topk=256,invalid=1.0",
    "s_q=1234,s_kv=4321,topk=4096,invalid=1.0",
    "s_q=4096,s_kv=2048,topk=2048,invalid=1.0",
    "s_q=1,s_kv=32,topk=2048",
    "s_q=1024,s_kv=32,topk=2048",
    "s_q=1,s_kv=64,topk=8192",
    "s_q=1024,s_kv=64,topk=8192",
    "s_q=1234,s_kv=4321,topk=4096,invalid=0.1",
)


_FLASHMLA_LONG = (
    "s_q=70000,s_kv=256,h=128,d=512,topk=256",
    "s_q=70000,s_kv=256,h=64,d=576,topk=256",
)


# What FlashMLA's tests vary besides the shape; the last two have holes before valid slots, which
# those tests never have.
_FLASHMLA_FEATURES = ("", ",sink=mixed,length=ragged", ",sink=mixed,length=ragged,invalid=0.3")


def lines(full: bool) -> list[str]:
    """The case lines of sparse-prefill; in full those of FlashMLA's test matrix with its corner
    shapes, over both head counts and both d_qk, too.
    """
    default = [*_spread(_EVERYWHERE), *(f"sparse-prefill:{words}" for words in _ONCE)]
    return [*default, *_flashmla_lines()] if full else default


def _flashmla_lines() -> list[str]:
    shapes = [
        f"s_q={s_q},s_kv={s_kv},topk={topk},data=flashmla{features}"
        for (s_kv, topk), s_q in product(_FLASHMLA_SHAPES, _FLASHMLA_TOKENS)
        for features in _FLASHMLA_FEATURES
    ]
    corners = [f"{words},data=flashmla,sink=mixed" for words in _FLASHMLA_CORNERS]
    long = [f"sparse-prefill:{words},data=flashmla,sink=mixed" for words in _FLASHMLA_LONG]
    return [*_spread([*shapes, *corners]), *long]


def _spread(lines: tuple[str, ...] | list[str]) -> Iterator[str]:
    """Each line with both d_qk and both head counts, each with a seed of its own."""
    for number, words in enumerate(lines):
        for d, h in product(WIDTHS, HEADS):
            seed = 4 * number + 2 * WIDTHS.index(d) + HEADS.index(h)
            yield f"sparse-prefill:h={h},d={d},{words},seed={seed}"
