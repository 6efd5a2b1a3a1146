"""The layouts of paged KV caches, as data.

Whatever reads or writes a page, on any backend, takes its offsets from this table and from
nowhere else. They are FlashMLA's 656- and 584-byte tokens (its tests/quant.py; vLLM 0.33.0, models/
deepseek_v4/common/ops/cache_utils.py) and plain bfloat16 rows.

A page of P tokens is made of regions, one after another, each with a fixed number of bytes per
token; a field of a token lies at a fixed offset within its share of a region. A V4 page of 64:

    0      tokens 0..63, 576 bytes each: 448 float8 codes, 64 bfloat16
    36864  tokens 0..63, 8 bytes each: 7 scale bytes, 1 byte of padding
    37376  padding to a multiple of 576 bytes
    37440  the next page
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

BF16_BYTES = 2

ScaleKind = Literal["ue8m0", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """Consecutive bytes of every token: `size` of them, at `offset` in its share of a region."""

    region: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a group of values is given its scale.

    With amax = max(|x| of the group, amax_floor), power_of_two scales are 2^ceil(log2(amax/448))
    and the others float32(amax / 448).
    """

    power_of_two: bool
    amax_floor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised:
    """The leading columns of a row: float8_e4m3fn codes, times one scale per group of columns."""

    codes: Field
    scales: Field
    group: int
    scale_kind: ScaleKind
    scale_rules: dict[str, ScaleRule]  # the first is what a writer does unless told otherwise

    @property
    def columns(self) -> int:
        return self.codes.size

    @property
    def groups(self) -> int:
        return self.columns // self.group


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVFormat:
    """One layout. A row of D values is `quantised` columns, then those kept as bfloat16."""

    name: str
    regions: tuple[int, ...]  # bytes per token
    quantised: Quantised | None
    plain: Field  # the bfloat16 columns
    padding: tuple[Field, ...] = ()  # a writer puts 0 there
    page_multiple: int = 1  # bytes; a page's stride is a multiple of it

    @property
    def d(self) -> int:
        """Columns of a dequantised row."""
        return self.quantised_columns + self.plain.size // BF16_BYTES

    @property
    def quantised_columns(self) -> int:
        return 0 if self.quantised is None else self.quantised.columns

    @property
    def token_bytes(self) -> int:
        return sum(self.regions)

    @property
    def is_bytes(self) -> bool:
        """Whether a cache is uint8 [num_pages, page_stride], not bfloat16 [num_pages, P, D]."""
        return self.quantised is not None

    def page_stride(self, page_size: int) -> int:
        """Bytes from one page to the next."""
        return math.ceil(page_size * self.token_bytes / self.page_multiple) * self.page_multiple

    def first_byte(self, field: Field, page_size: int) -> int:
        """Where token 0 of a page has the field, in bytes from the page's start."""
        return page_size * sum(self.regions[: field.region]) + field.offset

    def token_stride(self, field: Field) -> int:
        """Bytes from a token's field to the next token's."""
        return self.regions[field.region]

    def byte_offset(self, field: Field, page_size: int, slot: int) -> int:
        """Where the token of a slot has the field, in bytes from the cache's start.

        slot = page * page_size + offset in the page. Exact at any size: V4, 64 to a page, passes
        2^31 at page 57359.
        """
        page, token = divmod(slot, page_size)
        in_page = self.first_byte(field, page_size) + token * self.token_stride(field)
        return page * self.page_stride(page_size) + in_page

    def cache_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        if self.is_bytes:
            return (num_pages, self.page_stride(page_size))
        return (num_pages, page_size, self.d)

    def scale_rule(self, name: str | None) -> ScaleRule:
        """A writer's rule by its name; None is the format's own. ValueError for another name."""
        rules = {} if self.quantised is None else self.quantised.scale_rules
        if name is None and rules:
            return next(iter(rules.values()))
        if name not in rules:
            accepted = " or ".join(map(repr, rules)) or "None (it has no scales)"
            raise ValueError(f"scale_rule must be {accepted} for {self.name}; got {name!r}")
        return rules[name]


def _v4_fp8() -> KVFormat:
    codes = Field(region=0, offset=0, size=448)
    return KVFormat(
        name="v4-fp8",
        regions=(576, 8),
        quantised=Quantised(
            codes=codes,
            scales=Field(region=1, offset=0, size=7),
            group=64,
            scale_kind="ue8m0",
            scale_rules={"power-of-two": ScaleRule(power_of_two=True, amax_floor=1e-4)},
        ),
        plain=Field(region=0, offset=448, size=128),
        padding=(Field(region=1, offset=7, size=1),),
        page_multiple=576,
    )


def _v32_fp8() -> KVFormat:
    # FlashMLA's own quantiser holds amax/448, not amax, to at least 1e-4.
    power_of_two = ScaleRule(power_of_two=True, amax_floor=448 * 1e-4)
    return KVFormat(
        name="v3.2-fp8",
        regions=(656,),
        quantised=Quantised(
            codes=Field(region=0, offset=0, size=512),
            scales=Field(region=0, offset=512, size=16),
            group=128,
            scale_kind="float32",
            scale_rules={
                "amax/448": ScaleRule(power_of_two=False, amax_floor=1e-4),
                "power-of-two": power_of_two,
            },
        ),
        plain=Field(region=0, offset=528, size=128),
    )


def _bf16(name: str, d: int) -> KVFormat:
    size = d * BF16_BYTES
    return KVFormat(
        name=name, regions=(size,), quantised=None, plain=Field(region=0, offset=0, size=size)
    )


FORMATS: dict[str, KVFormat] = {
    layout.name: layout
    for layout in (_v4_fp8(), _v32_fp8(), _bf16("bf16", 512), _bf16("bf16-576", 576))
}


def format_named(name: object) -> KVFormat:
    """The format of a name; ValueError for one that isn't in FORMATS."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"kv_format must be one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]
