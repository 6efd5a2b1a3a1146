"""Quantising and dequantising: exact at every code, every scale byte and every power of two."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.kv_cache import (
    FORMATS,
    PagedKV,
    empty_cache,
    insert_kv,
    quantize,
    read_kv,
    read_scales,
)
from jax_impl.kv_cache.formats import Quantised
from tests.jax_impl.kv_cache.model import BF16, E4M3, bits, int32, page_bytes

ALL_BYTES = np.arange(256, dtype=np.uint8)


def quantised_columns(name: str) -> Quantised:
    quantised = FORMATS[name].quantised
    assert quantised is not None
    return quantised


V4, V32 = quantised_columns("v4-fp8"), quantised_columns("v3.2-fp8")


def test_the_table_of_all_256_ue8m0_bytes():
    """2^(u - 127) exactly: 2^-127, which is subnormal, for 0, and NaN for 255."""
    got = np.asarray(jax.jit(quantize.ue8m0_bits)(ALL_BYTES)).view(np.float32)
    for byte in range(255):
        # Through integers, since a comparison may flush a subnormal number.
        numerator, denominator = float(got[byte]).as_integer_ratio()
        assert Fraction(numerator, denominator) == Fraction(2) ** (byte - 127), byte
    assert np.isnan(got[255])
    assert got[127] == 1.0 and got.view(np.uint32)[0] == 0x00400000


def test_every_code_under_every_scale_byte_is_the_bfloat16_nearest_to_the_product():
    codes, scales = np.meshgrid(ALL_BYTES, ALL_BYTES, indexing="ij")
    got = bits(jax.jit(quantize.e4m3_times_ue8m0)(codes, scales))
    scale = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    exact = codes.view(E4M3).astype(np.float64) * scale
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32).astype(BF16)  # float32 holds every finite product
    number = ~np.isnan(exact)
    np.testing.assert_array_equal(got[number], expected.view(np.uint16)[number])
    assert np.isnan(got.view(BF16).astype(np.float32)[~number]).all()
    assert number.sum() == 254 * 255
    # Where bfloat16 can hold the product it is the product itself.
    held = number & (expected.astype(np.float64) == exact)
    np.testing.assert_array_equal(got.view(BF16).astype(np.float64)[held], exact[held])
    # It can't hold, of each sign: 280 products of 2^128 and more, and with the three smallest
    # scales 24, 16 and 8 that are no multiples of 2^-133.
    beyond = number & ~held
    assert beyond[:, 3:247].sum() == 0
    assert beyond[:, 248:].sum() == 2 * 273 and beyond[:, 247].sum() == 2 * 7
    assert beyond[:, :3].sum(axis=0).tolist() == [48, 32, 16]


def test_every_code_under_every_scale_byte_is_read_so_from_a_cache():
    """256 tokens of one scale byte each, every code in a row of 448."""
    paged = empty_cache("v4-fp8", num_pages=256, page_size=1)
    pages = page_bytes(paged)
    codes = np.resize(ALL_BYTES, 448)
    pages[:, :448] = codes
    pages[:, 576:583] = ALL_BYTES[:, None]
    row = read_kv(PagedKV(pages, 1, "v4-fp8"), np.arange(256, dtype=np.int32))
    expected = jax.jit(quantize.e4m3_times_ue8m0)(codes[None], ALL_BYTES[:, None])
    np.testing.assert_array_equal(bits(row)[:, :448], np.asarray(expected))


def test_decoding_a_v32_code_rounds_float32_products_once():
    scales = np.array([0.75, 1 / 3, 1.1, 2.0**-20], np.float32)
    data = np.zeros((1, 656 * 256), np.uint8).reshape(1, 256, 656)
    data[0, :, :512] = ALL_BYTES[:, None]
    data[0, :, 512:528] = scales.view(np.uint8)
    paged = PagedKV(data.reshape(1, -1), 256, "v3.2-fp8")
    got = np.asarray(read_kv(paged, np.arange(256, dtype=np.int32)))
    products = ALL_BYTES.view(E4M3).astype(np.float32)[:, None] * scales
    expected = products.astype(BF16).repeat(128, axis=1)
    np.testing.assert_array_equal(got[:, :512].astype(np.float32), expected.astype(np.float32))


def test_decoded_values_are_rounded_to_bfloat16_also_where_a_cast_back_follows():
    data = np.zeros((1, 656), np.uint8)
    data[0, :512] = 0x39  # 1.125
    data[0, 512:528] = np.array([1 / 3] * 4, np.float32).view(np.uint8)
    paged = PagedKV(data, 1, "v3.2-fp8")
    widened = jax.jit(lambda p: read_kv(p, jnp.array([0], jnp.int32)).astype(jnp.float32))(paged)
    assert widened[0, 0] == np.float32(np.float32(1.125) * np.float32(1 / 3)).astype(BF16)


def _exponent(amax: float) -> int:
    """The least e with 448 * 2^e >= amax, in exact arithmetic."""
    e = -25
    while 448 * Fraction(2) ** e < Fraction(float(amax)):
        e += 1
    return e


def test_scale_exponents_are_exact_at_and_around_every_power_of_two_times_448():
    exact = np.float32(448) * np.exp2(np.arange(-22, 120)).astype(np.float32)
    around = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
    got = np.stack([np.asarray(jax.jit(quantize.scale_exponent)(a)) for a in around])
    np.testing.assert_array_equal(got[0], np.arange(-22, 120))
    np.testing.assert_array_equal(got[1], np.arange(-22, 120))
    np.testing.assert_array_equal(got[2], np.arange(-22, 120) + 1)


@settings(max_examples=300, deadline=None)
@given(st.floats(min_value=2.0**-14, max_value=2.0**127 * 1.75, width=32))
def test_a_scale_exponent_is_the_least_that_holds_amax(amax):
    assert int(quantize.scale_exponent(jnp.float32(amax))) == _exponent(amax)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_codes_are_the_nearest_float8_of_value_over_scale(dtype):
    random = np.random.default_rng(1)
    sizes = np.exp2(random.integers(-20, 20, (64, 1)))
    values = (random.standard_normal((64, 448)) * sizes).astype(dtype)
    codes, scales = quantize.encode(jnp.asarray(values), V4, V4.scale_rules["power-of-two"])
    groups = values.astype(np.float64).reshape(64, 7, 64)
    expected = np.array(
        [[_exponent(max(np.abs(g).max(), np.float32(1e-4))) + 127 for g in row] for row in groups]
    )
    np.testing.assert_array_equal(scales, expected)
    scaled = groups / np.exp2(expected - 127.0)[..., None]
    np.testing.assert_array_equal(
        np.asarray(codes), scaled.astype(np.float32).astype(E4M3).view(np.uint8).reshape(64, 448)
    )


def test_v32_scales_and_codes_are_divisions_rounded_once():
    random = np.random.default_rng(6)
    sizes = np.exp2(random.integers(-10, 10, (500, 4, 1)))
    values = (random.standard_normal((500, 4, 128)) * sizes).astype(np.float32)
    rule = V32.scale_rules["amax/448"]
    codes, scales = jax.jit(lambda x: quantize.encode(x, V32, rule))(values.reshape(500, 512))
    expected = np.abs(values).max(axis=-1) / np.float32(448)
    np.testing.assert_array_equal(np.asarray(scales).view(np.float32), expected)
    held = np.clip(values / expected[..., None], -448, 448).astype(E4M3)
    np.testing.assert_array_equal(codes, held.view(np.uint8).reshape(500, 512))


def test_codes_saturate_where_a_plain_cast_gives_nan():
    values = np.array([448, 464, 465, 500, -500, 1e30], np.float32)
    assert np.isnan(values.astype(E4M3).astype(np.float32)[2:]).all()
    stored = np.asarray(quantize.e4m3_codes(jnp.asarray(values))).view(E4M3).astype(np.float32)
    np.testing.assert_array_equal(stored, [448, 448, 448, 448, -448, 448])
    decoded = np.array([0x7E, 0x7F, 0xFF], np.uint8).view(E4M3).astype(np.float32)
    assert decoded[0] == 448 and np.isnan(decoded[1:]).all()


@pytest.mark.parametrize("exponent", [-22, -3, 0, 1, 100])
def test_a_largest_value_of_448_times_a_power_of_two_takes_that_power(exponent):
    values = np.zeros((1, 512), np.float32)
    values[0, :64] = 448 * 2.0**exponent * np.linspace(-1, 1, 64)
    paged = insert_kv(empty_cache("v4-fp8", num_pages=1, page_size=1), values, int32([0]))
    assert page_bytes(paged)[0, 576] == exponent + 127
    row = np.asarray(read_kv(paged, int32([0])), np.float32)[0]
    assert np.abs(row).max() == 448 * 2.0**exponent


@pytest.mark.parametrize("value", [0.0, 1e-6, -5e-5])
def test_small_groups_get_the_scale_of_the_floor(value):
    """1e-4 / 448 lies between 2^-23 and 2^-22: byte 105, the smallest a writer stores."""
    values = np.full((1, 512), value, np.float32)
    paged = insert_kv(empty_cache("v4-fp8", num_pages=1, page_size=1), values, int32([0]))
    assert (page_bytes(paged)[0, 576:583] == 105).all()
    code = np.float32(value * 2.0**22).astype(E4M3).view(np.uint8)
    assert (page_bytes(paged)[0, :448] == code).all()


@pytest.mark.parametrize("name", ["v4-fp8", "v3.2-fp8"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_group_with_a_value_that_is_not_finite_is_nan_and_no_other_is(name, wrong):
    values = np.ones((1, FORMATS[name].d), np.float32)
    values[0, 130] = wrong
    paged = insert_kv(empty_cache(name, num_pages=1, page_size=1), values, int32([0]))
    row = np.asarray(read_kv(paged, int32([0])), np.float32)[0]
    group = 64 if name == "v4-fp8" else 128
    first = 130 // group * group
    assert np.isnan(row[first : first + group]).all()
    np.testing.assert_allclose(np.delete(row, np.arange(first, first + group)), 1, rtol=2**-4)
    codes = page_bytes(paged)[0, first : first + group]
    assert (codes == 0x7F).all()  # NaN also for readers of another mind about the scale


class TestV32Scales:
    """FlashMLA#184: a reader that forces scales to powers of two, under a writer that doesn't."""

    values = np.zeros((1, 576), np.float32)
    values[0, 0] = 3.0  # the other three groups are zero

    def insert(self, **options):
        paged = empty_cache("v3.2-fp8", num_pages=1, page_size=1)
        paged = insert_kv(paged, self.values, int32([0]), **options)
        return np.asarray(read_scales(paged, int32([0])))[0], page_bytes(paged)[0]

    def test_a_reader_takes_the_scale_as_it_is(self):
        data = np.zeros((1, 656), np.uint8)
        data[0, 0] = 0x38  # 1.0
        data[0, 512:528] = np.array([0.75] * 4, np.float32).view(np.uint8)
        paged = PagedKV(data, 1, "v3.2-fp8")
        assert np.asarray(read_kv(paged, int32([0])))[0, 0] == 0.75  # 0.5 or 1.0 if forced

    def test_the_power_of_two_writer(self):
        scales, data = self.insert(scale_rule="power-of-two")
        assert scales[0] == 2.0**-7 and data[:1].view(E4M3)[0] == 384
        assert (scales[1:] == 2.0**-13).all() and not data[128:512].any()

    def test_the_writer_of_amax_over_448(self):
        scales, data = self.insert()
        assert scales[0] == np.float32(3) / np.float32(448) and data[:1].view(E4M3)[0] == 448
        assert (scales[1:] == np.float32(1e-4) / np.float32(448)).all()
        assert not data[128:512].any()
        assert np.log2(scales[0]) % 1  # backend-divergent


@pytest.mark.parametrize(
    ("name", "rule", "accepted"),
    [
        ("v4-fp8", "amax/448", "'power-of-two' for v4-fp8"),
        ("v3.2-fp8", "ue8m0", "'amax/448' or 'power-of-two' for v3.2-fp8"),
        ("bf16", "power-of-two", r"None \(it has no scales\) for bf16"),
    ],
)
def test_a_rule_that_a_format_has_not_is_refused(name, rule, accepted):
    paged = empty_cache(name, num_pages=1, page_size=1)
    values = np.zeros((1, paged.d), np.float32)
    with pytest.raises(ValueError, match=f"scale_rule must be {accepted}; got '{rule}'"):
        insert_kv(paged, values, int32([0]), scale_rule=rule)


def test_encoding_is_the_same_inside_and_outside_of_jit():
    values = np.random.default_rng(2).standard_normal((33, 576)).astype(np.float32)
    for name in ("v4-fp8", "v3.2-fp8", "bf16"):
        paged = empty_cache(name, num_pages=3, page_size=11)
        rows, slots = values[:, : paged.d], np.arange(33, dtype=np.int32)
        eager = insert_kv(paged, rows, slots)
        traced = jax.jit(insert_kv)(paged, rows, slots)
        np.testing.assert_array_equal(page_bytes(eager), page_bytes(traced))
