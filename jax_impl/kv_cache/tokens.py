"""Single tokens of a paged cache: read_kv, read_scales, insert_kv.

Pages and offsets within a page stay two indices all the way down to XLA: their product, a byte
offset, passes 2^31 in caches of two gigabytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_impl.arrays import bits_as, is_traced, namespace, shape_of, to_jax
from jax_impl.kv_cache import quantize
from jax_impl.kv_cache.formats import Field, KVFormat, ScaleRule, format_named
from jax_impl.kv_cache.paged import PagedKV, check_paged

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float, Float32, Int32, UInt8, UInt16

SKIPPED = -1

DECODED_AT_A_TIME = 256


def read_kv(paged: PagedKV, slots: Int32[Any, "*rest"]) -> BFloat16[Array, "*rest D"]:
    """The dequantised rows of slots.

    slots: int32 of any shape; slot s is token s % P of page s // P. Outside jit a slot that the
      cache hasn't got is refused (ValueError); inside, it acts as the nearest one it has.

    Float8 columns are bfloat16(float32(code) * scale): exact for power-of-two scales, NaN for
    NaN codes and NaN scales. A cache without slots serves an empty list only.
    """
    check_paged(paged)
    shape = _check_slots(slots, "slots")
    slots = to_jax(slots, "slots")
    if 0 in shape:
        return jnp.zeros((*shape, paged.d), jnp.bfloat16)
    if not is_traced(slots) or paged.num_slots == 0:
        _check_in_cache(slots, paged, "slots", "0")
    return _read(paged, slots)


@jax.jit
def _read(paged: PagedKV, slots: jax.Array) -> jax.Array:
    slots = jnp.clip(slots, 0, paged.num_slots - 1)
    page, token = slots // paged.page_size, slots % paged.page_size
    return bits_as(row_bits(paged, page, token), jnp.bfloat16)


def read_scales(paged: PagedKV, slots: Int32[Any, "*rest"]) -> Float32[Array, "*rest groups"]:
    """The scales of slots' groups, as float32; slots as in read_kv.

    A scale that isn't a power of two makes a cache backend-divergent: FlashMLA's V3.2 decode
    rounds it to bfloat16, and other readers to a power of two.

    ValueError for a format without scales.
    """
    check_paged(paged)
    if paged.layout.quantised is None:
        raise ValueError(f"paged must be in a format with scales; {paged.kv_format} has none")
    shape = _check_slots(slots, "slots")
    slots = to_jax(slots, "slots")
    if 0 in shape:
        return jnp.zeros((*shape, paged.layout.quantised.groups), jnp.float32)
    if not is_traced(slots) or paged.num_slots == 0:
        _check_in_cache(slots, paged, "slots", "0")
    return _read_scales(paged, slots)


@jax.jit
def _read_scales(paged: PagedKV, slots: jax.Array) -> jax.Array:
    slots = jnp.clip(slots, 0, paged.num_slots - 1)
    page, token = slots // paged.page_size, slots % paged.page_size
    quantised = paged.layout.quantised
    assert quantised is not None
    return quantize.scale_values(_field(paged, quantised.scales, page, token), quantised)


def row_bits(
    paged: PagedKV, page: Int32[Array, "*rest"], token: Int32[Array, "*rest"]
) -> UInt16[Array, "*rest D"]:
    """Bits of bfloat16 rows. Pages and tokens outside act as the nearest. For use inside jit, or
    on NumPy's arrays, which give NumPy's."""
    layout = paged.layout
    if layout.quantised is None:
        xp = namespace(page, token)
        page = xp.clip(page, 0, paged.num_pages - 1)
        rows = paged.cache[page, xp.clip(token, 0, paged.page_size - 1)]
        return bits_as(rows, jnp.uint16)
    return decoded(layout, *region_bytes(paged, page, token))


def region_bytes(
    paged: PagedKV, page: Int32[Array, "*rest"], token: Int32[Array, "*rest"]
) -> tuple[UInt8[Array, "..."], ...]:
    """A token's share of each region of its page, of a format of bytes; as `row_bits`."""
    layout = paged.layout
    shares = [Field(region=i, offset=0, size=size) for i, size in enumerate(layout.regions)]
    return tuple(_field(paged, share, page, token) for share in shares)


def decoded(layout: KVFormat, *regions: UInt8[Array, "..."]) -> UInt16[Array, "*rest D"]:
    """Bits of bfloat16 rows from the bytes of their tokens; as `row_bits`."""
    if isinstance(regions[0], np.ndarray):
        return _decoded_in_blocks(layout, regions)
    quantised = layout.quantised
    assert quantised is not None
    codes, scales, plain = (
        regions[field.region][..., field.offset : field.offset + field.size]
        for field in (quantised.codes, quantised.scales, layout.plain)
    )
    return quantize.decode(codes, scales, plain, quantised)


def _decoded_in_blocks(layout: KVFormat, regions: tuple[np.ndarray, ...]) -> np.ndarray:
    """Some rows at a time, so that calls of all sizes have one program in common."""
    rest = regions[0].shape[:-1]
    regions = tuple(region.reshape(-1, region.shape[-1]) for region in regions)
    rows = len(regions[0])
    bits = np.empty((rows, layout.d), np.uint16)
    for first in range(0, rows, DECODED_AT_A_TIME):
        block = [region[first : first + DECODED_AT_A_TIME] for region in regions]
        left = len(block[0])
        missing = [(0, DECODED_AT_A_TIME - left), (0, 0)]
        found = _decode_block(layout.name, *(np.pad(part, missing) for part in block))
        bits[first : first + left] = np.asarray(found)[:left]
    return bits.reshape(*rest, layout.d)


@functools.partial(jax.jit, static_argnums=0)
def _decode_block(kv_format: str, *regions: jax.Array) -> jax.Array:
    return decoded(format_named(kv_format), *map(jnp.asarray, regions))  # also without jit


def _field(paged: PagedKV, field: Field, page: jax.Array, token: jax.Array) -> UInt8[Array, "..."]:
    layout = paged.layout
    in_page = layout.first_byte(field, paged.page_size) + token * layout.token_stride(field)
    if isinstance(paged.cache, np.ndarray):
        page = np.clip(page, 0, paged.num_pages - 1)
        return paged.cache[page[..., None], in_page[..., None] + np.arange(field.size)]
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(page.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(
        paged.cache,
        jnp.stack([page, in_page], axis=-1),
        numbers,
        slice_sizes=(1, field.size),
        mode=lax.GatherScatterMode.CLIP,
    )


def insert_kv(
    paged: PagedKV,
    values: Float[Any, "N D"],
    slot_mapping: Int32[Any, " N"],
    *,
    scale_rule: str | None = None,
) -> PagedKV:
    """A cache with rows quantised and written to their slots; the rest of it as it was.

    Args:
      values: [N, D] bfloat16 or float32.
      slot_mapping: [N] int32. -1 skips a token, as in vLLM. Outside jit any other slot that the
        cache hasn't got is refused, and so is a slot that two tokens are written to; inside,
        the first is skipped as well, and either of the two may stay.
      scale_rule: how float8 groups get their scales. With amax = max(|x|, floor):
        "power-of-two": 2^ceil(log2(amax / 448)), the only rule of v4-fp8 (floor 1e-4), and what
          FlashMLA's own V3.2 quantiser does (floor 448e-4);
        "amax/448": that number itself, what v3.2-fp8 does unless told otherwise (floor 1e-4).

    Codes are x / scale, clamped to +-448, rounded to the nearest float8_e4m3fn, halves to even.
    A group with a NaN or an infinity is NaN as a whole when read. Columns that aren't quantised
    are rounded to bfloat16; padding bytes of a token become 0.
    """
    check_paged(paged)
    layout = paged.layout
    rows, width = shape_of(values, "values", "[N, D]", ("bfloat16", "float32"))
    if width != paged.d:
        raise ValueError(f"values must be {paged.d} wide for {layout.name}; got {width}")
    (slots,) = _check_slots(slot_mapping, "slot_mapping", "[N]")
    if slots != rows:
        raise ValueError(
            f"slot_mapping must have a slot for each of the {rows} rows of values; got {slots}"
        )
    rule = None
    if layout.quantised is not None or scale_rule is not None:
        rule = layout.scale_rule(scale_rule)
    slot_mapping = to_jax(slot_mapping, "slot_mapping")
    if not is_traced(slot_mapping):
        _check_in_cache(slot_mapping, paged, "slot_mapping", "-1 (skipped)", least=SKIPPED)
        _check_distinct(np.asarray(slot_mapping))
    if 0 in (rows, paged.num_slots):
        return paged
    return _insert(paged, to_jax(values, "values"), slot_mapping, rule=rule)


@functools.partial(jax.jit, static_argnames=("rule",))
def _insert(
    paged: PagedKV, values: jax.Array, slots: jax.Array, *, rule: ScaleRule | None
) -> PagedKV:
    layout = paged.layout
    wanted = (slots >= 0) & (slots < paged.num_slots)
    # A page behind the last one is where scatters drop what nobody wants.
    page = jnp.where(wanted, slots // paged.page_size, paged.num_pages)
    token = slots % paged.page_size
    plain = quantize.bf16_bits(values[:, layout.quantised_columns :])
    if layout.quantised is None or rule is None:
        words = lax.bitcast_convert_type(paged.cache, jnp.uint16)
        words = words.at[page, token].set(plain, mode="drop")
        cache = lax.bitcast_convert_type(words, jnp.bfloat16)
        return PagedKV(cache, paged.page_size, paged.kv_format)
    codes, scales = quantize.encode(values[:, : layout.quantised_columns], layout.quantised, rule)
    fields = [
        (layout.quantised.codes, codes),
        (layout.quantised.scales, scales),
        (layout.plain, lax.bitcast_convert_type(plain, jnp.uint8).reshape(len(slots), -1)),
        *((pad, jnp.zeros((len(slots), pad.size), jnp.uint8)) for pad in layout.padding),
    ]
    cache = paged.cache
    for field, content in fields:
        cache = _with_field(cache, layout, paged.page_size, field, page, token, content)
    return PagedKV(cache, paged.page_size, paged.kv_format)


def _with_field(
    cache: jax.Array,
    layout: KVFormat,
    page_size: int,
    field: Field,
    page: jax.Array,
    token: jax.Array,
    content: jax.Array,
) -> jax.Array:
    in_page = layout.first_byte(field, page_size) + token * layout.token_stride(field)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(
        cache,
        jnp.stack([page, in_page], axis=-1),
        content,
        numbers,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _check_slots(slots: Any, name: str, axes: str | None = None) -> tuple[int, ...]:
    if isinstance(slots, np.generic):
        raise ValueError(
            f"{name} must be an array; got a NumPy scalar, {slots!r}, of which np.asarray makes one"
        )
    if axes is None:
        axes = "[" + ", ".join(["rest"] * getattr(slots, "ndim", 1)) + "]"
    return shape_of(slots, name, axes, ("int32",))


def _check_in_cache(slots: Any, paged: PagedKV, name: str, least_name: str, least: int = 0) -> None:
    slots = np.asarray(slots)
    for at in np.argwhere((slots < least) | (slots >= paged.num_slots))[:1]:
        place = ", ".join(map(str, at))
        raise ValueError(
            f"{name} must lie between {least_name} and {paged.num_slots - 1}, the last slot of "
            f"the cache; got {slots[tuple(at)]} at [{place}]"
        )


def _check_distinct(slots: np.ndarray) -> None:
    written = slots[slots != SKIPPED]
    distinct, counts = np.unique(written, return_counts=True)
    for slot in distinct[counts > 1][:1]:
        raise ValueError(
            f"slot_mapping must name a slot once; got {slot} for {counts[distinct == slot][0]} "
            "tokens"
        )
