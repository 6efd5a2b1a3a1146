"""Where each value of a token lies in a page: one table, which writer and reader both go by.

A page of P tokens is a stretch of bytes. Of each token a format keeps up to four regions:

    codes    e4m3 bytes of the first columns, one a value
    scales   what a group of codes is multiplied by: a UE8M0 byte u for 2^(u - 127), or an fp32
    raw      bf16 values of the remaining columns
    padding  bytes that are written 0

Region r of token p starts at byte `r.before * P + p * r.stride + r.offset`: `before` is what each
token of the page takes in the parts that stand in front of this one.

Sources: FlashMLA's tests/quant.py and flash_mla_interface.py; vLLM's deepseek_v4 cache_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Region:
    """`size` bytes of each token; see the module's docstring for where they lie."""

    size: int
    stride: int
    offset: int = 0
    before: int = 0

    def start(self, page_size: int) -> int:
        """The byte of a page at which the first token's region starts."""
        return self.before * page_size + self.offset


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """A page layout. columns is D, of which the first codes.size are quantised by groups.

    A page takes page_size * token_bytes, rounded up to a multiple of page_multiple. amax_floor is
    what the encoder takes for the largest magnitude of a group at least.
    """

    name: str
    columns: int
    token_bytes: int
    raw: Region
    codes: Region | None = None
    scales: Region | None = None
    scale_kind: Literal["ue8m0", "fp32"] | None = None
    group: int = 0
    amax_floor: float = 0.0
    padding: Region | None = None
    page_multiple: int = 1

    @property
    def quantised(self) -> int:
        """How many columns are kept as fp8 codes; the others are bf16."""
        return 0 if self.codes is None else self.codes.size

    @property
    def groups(self) -> int:
        """Scales of one token."""
        return self.quantised // self.group if self.group else 0

    def page_bytes(self, page_size: int) -> int:
        """The page stride in bytes, padding included.

        v4-fp8 requires the padding: FlashMLA's Hopper kernel loads 16 bytes at a time and its
        Blackwell one encodes the stride for TMA.
        """
        return -(-page_size * self.token_bytes // self.page_multiple) * self.page_multiple


_V4 = KVFormat(
    name="v4-fp8",
    columns=512,
    token_bytes=584,
    codes=Region(size=448, stride=576),
    raw=Region(size=128, stride=576, offset=448),
    scales=Region(size=7, stride=8, before=576),
    padding=Region(size=1, stride=8, offset=7, before=576),
    scale_kind="ue8m0",
    group=64,
    amax_floor=1e-4,
    page_multiple=576,
)

# FlashMLA's quantiser lets no scale fall below 1e-4, and so no amax below 448 times that.
_V32 = KVFormat(
    name="v3.2-fp8",
    columns=576,
    token_bytes=656,
    codes=Region(size=512, stride=656),
    scales=Region(size=16, stride=656, offset=512),
    raw=Region(size=128, stride=656, offset=528),
    scale_kind="fp32",
    group=128,
    amax_floor=448 * 1e-4,
)


def _bf16(name: str, columns: int) -> KVFormat:
    return KVFormat(
        name=name,
        columns=columns,
        token_bytes=2 * columns,
        raw=Region(size=2 * columns, stride=2 * columns),
    )


FORMATS: dict[str, KVFormat] = {
    layout.name: layout for layout in (_V4, _V32, _bf16("bf16", 512), _bf16("bf16-576", 576))
}


def find_format(name: str) -> KVFormat:
    """The layout of that name; ValueError names those that exist."""
    if name not in FORMATS:
        raise ValueError(f"kv_format: {name!r}; accepted are {', '.join(FORMATS)}")
    return FORMATS[name]
