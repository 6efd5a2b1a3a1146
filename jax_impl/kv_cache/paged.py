"""A paged cache together with what its bytes can't say: page size and format."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.arrays import shape_of, to_jax
from jax_impl.kv_cache.formats import KVFormat, format_named

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class PagedKV:
    """A paged KV cache; a pytree whose one leaf is `cache`.

    cache: "v4-fp8" and "v3.2-fp8": uint8 [num_pages, page_stride], where the stride is the
      format's for this page size (64 tokens of V4: 37440 bytes). "bf16", "bf16-576": bfloat16
      [num_pages, page_size, D]. JAX's or NumPy's; another library's array is taken over through
      DLPack, without a copy if it is compact: its memory then has to stay as it is.
    page_size: tokens to a page, at least 1. Never inferred from the cache's shape, which has to
      agree with it.
    kv_format: a name in FORMATS.

    Slot s is token s % page_size of page s // page_size. A cache holds at most 2^31 - 1 slots,
    so that a slot is an int32; its bytes may go far beyond 2^31.

    ValueError names the argument that is wrong.
    """

    cache: Any
    page_size: int
    kv_format: str

    def __post_init__(self) -> None:
        layout = format_named(self.kv_format)
        page_size = check_page_size(self.page_size, layout)
        if layout.is_bytes:
            axes, dtype = "[num_pages, page_stride]", "uint8"
        else:
            axes, dtype = "[num_pages, P, D]", "bfloat16"
        shape = shape_of(self.cache, "cache", axes, (dtype,))
        expected = layout.cache_shape(shape[0], page_size)
        if shape != expected:
            raise ValueError(
                f"cache must be {list(expected)} for pages of {page_size} tokens of "
                f"{layout.name}; got {list(shape)}"
            )
        _check_slots(shape[0], page_size)
        object.__setattr__(self, "page_size", page_size)
        object.__setattr__(self, "cache", to_jax(self.cache, "cache"))

    @property
    def layout(self) -> KVFormat:
        return format_named(self.kv_format)

    @property
    def num_pages(self) -> int:
        return self.cache.shape[0]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def d(self) -> int:
        """Columns of a dequantised row."""
        return self.layout.d


def _flatten(paged: PagedKV) -> tuple[tuple[Any], tuple[int, str]]:
    return (paged.cache,), (paged.page_size, paged.kv_format)


def _unflatten(static: tuple[int, str], leaves: tuple[Any]) -> PagedKV:
    # Without the checks: JAX puts other things than arrays in the place of leaves.
    paged = object.__new__(PagedKV)
    for name, value in zip(("cache", "page_size", "kv_format"), (*leaves, *static), strict=True):
        object.__setattr__(paged, name, value)
    return paged


jax.tree_util.register_pytree_node(PagedKV, _flatten, _unflatten)


def empty_cache(kv_format: str, *, num_pages: int, page_size: int, fill: int = 0) -> PagedKV:
    """A cache each byte of which is `fill`, 0 to 255, padding included.

    0xFF makes a cache in which any read is NaN: as float8, as a UE8M0 scale, as float32 and as
    bfloat16.
    """
    layout = format_named(kv_format)
    page_size = check_page_size(page_size, layout)
    if not _is_integer(num_pages) or num_pages < 0:
        raise ValueError(f"num_pages must be an integer >= 0; got {num_pages!r}")
    if not _is_integer(fill) or not 0 <= fill <= 0xFF:
        raise ValueError(f"fill must be a byte, 0 to 255; got {fill!r}")
    _check_slots(int(num_pages), page_size)
    shape = layout.cache_shape(int(num_pages), page_size)
    if layout.is_bytes:
        cache = jnp.full(shape, fill, jnp.uint8)
    else:
        words = jnp.full(shape, int(fill) * 0x101, jnp.uint16)
        cache = lax.bitcast_convert_type(words, jnp.bfloat16)
    return PagedKV(cache, page_size, layout.name)


def check_paged(paged: Any) -> None:
    if not isinstance(paged, PagedKV):
        raise ValueError(f"paged must be a PagedKV; got {type(paged).__name__}")


def check_page_size(page_size: Any, layout: KVFormat) -> int:
    """As a Python integer; ValueError unless it is at least 1 and a page's bytes fit an int32."""
    if not _is_integer(page_size) or page_size < 1:
        raise ValueError(f"page_size must be an integer >= 1; got {page_size!r}")
    if layout.page_stride(int(page_size)) > _INT32_MAX:
        raise ValueError(
            f"page_size must leave a page of {layout.name} under 2^31 bytes; got {page_size}"
        )
    return int(page_size)


def _check_slots(num_pages: int, page_size: int) -> None:
    if num_pages * page_size > _INT32_MAX:
        raise ValueError(
            f"cache must have at most 2^31 - 1 slots, which are int32; got {num_pages} pages of "
            f"{page_size}"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
