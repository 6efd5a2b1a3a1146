"""Codes and scales against plain Python: every e4m3 code, every UE8M0 byte, and their products."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from torch_ref.kv_cache import FORMATS, decode_e4m3, encode_e4m3, ue8m0_bytes, ue8m0_scales
from torch_ref.kv_cache.codec import EncodedRows, decode, encode

CODES = torch.arange(256, dtype=torch.uint8)
V4, V32 = FORMATS["v4-fp8"], FORMATS["v3.2-fp8"]


def e4m3(code: int) -> float:
    """The value of one code, from the fields of the format: 1 sign, 4 exponent, 3 mantissa."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values of one dtype, signs of zero included; NaN equals NaN."""
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


def test_every_code_decodes_to_the_value_of_its_fields():
    want = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    assert same(decode_e4m3(CODES), want)
    # ml_dtypes#260: 0x7E is 448, 0x7F and 0xFF are NaN, there is no infinity.
    assert want[0x7E] == 448 and want[[0x7F, 0xFF]].isnan().all() and not want.isinf().any()


def test_every_ue8m0_byte_is_its_power_of_two():
    scales = ue8m0_scales(CODES)
    assert scales[:255].tolist() == [math.ldexp(1.0, u - 127) for u in range(255)]
    assert scales[0] > 0 and scales[254] == 2.0**127
    assert scales[255].isnan()  # wrong: inf, as 2^128 in fp32 gives it


def test_encoding_takes_the_nearest_code_and_of_two_the_even_one():
    finite = [(e4m3(code), code) for code in range(0x7F)]
    values = sorted({value for value, _ in finite})
    halves = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    trials = values + halves + [math.nextafter(h, d) for h in halves for d in (0.0, 500.0)]
    trials = torch.tensor(trials, dtype=torch.float64).float().double().unique().tolist()
    for trial in trials:
        for sign in (1.0, -1.0):
            near = min(abs(value - trial) for value, _ in finite)
            best = [code for value, code in finite if abs(value - trial) == near]
            want = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
            got = int(encode_e4m3(torch.tensor([sign * trial], dtype=torch.float64)))
            assert got == want | (0x80 if sign < 0 else 0), (trial, sign)


def test_encoding_saturates_where_a_plain_cast_gives_nan():
    values = torch.tensor([448.0, 464.0, 465.0, 500.0, -500.0, math.inf, -math.inf])
    assert decode_e4m3(encode_e4m3(values)).tolist() == [448, 448, 448, 448, -448, 448, -448]


def test_every_code_under_every_scale_byte_is_the_exact_product_rounded_to_bf16_once():
    codes = CODES.repeat(256, 1)  # [byte, code], four rows of 64 codes for each byte
    scale_bytes = CODES[:, None].expand(256, 4)
    rows = EncodedRows(
        raw=torch.zeros(256 * 4, 128, dtype=torch.uint8),
        codes=codes.reshape(256 * 4, 64).repeat(1, 7),
        scales=scale_bytes.reshape(256 * 4, 1).repeat(1, 7),
    )
    got = decode(rows, V4)[:, :448].unflatten(1, (7, 64))
    assert all(same(got[:, g], got[:, 0]) for g in range(1, 7))
    got = got[:, 0].reshape(256, 256)

    values = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    scales = [math.ldexp(1.0, u - 127) for u in range(255)] + [math.nan]
    product = values[None, :] * torch.tensor(scales, dtype=torch.float64)[:, None]
    fits = product.abs().isnan() | (product == product.bfloat16().double())
    # bf16 holds every product whose least bit is 2^-133 or more, and none of 2^128 or more.
    assert int((~fits).sum()) == sum(not _in_bf16(p) for p in product.flatten().tolist())
    assert same(got[fits].double(), product[fits])
    assert same(got, product.float().bfloat16())
    assert fits[3:247].all()  # 2^-9 * 2^-124 up to 448 * 2^119


def _in_bf16(value: float) -> bool:
    if math.isnan(value) or value == 0:
        return True
    mantissa, exponent = math.frexp(abs(value))
    if exponent > 128:
        return False
    return math.ldexp(mantissa, min(8, exponent + 133)).is_integer()


@pytest.mark.parametrize("n", [-10, -3, 0, 1, 40])
def test_a_group_whose_maximum_is_448_times_a_power_of_two_takes_that_power(n):
    amax = torch.tensor([448 * 2.0**n])
    above, below = torch.nextafter(amax, amax * 2), torch.nextafter(amax, amax / 2)
    got = [int(ue8m0_bytes(x, floor=1e-4)) - 127 for x in (below, amax, above)]
    assert got == [n, n, n + 1]


def test_scale_bytes_are_the_least_power_that_brings_amax_to_448():
    g = torch.Generator().manual_seed(0)
    amax = torch.exp2(torch.rand(2000, generator=g) * 60 - 20).float()
    for value, byte in zip(amax.tolist(), ue8m0_bytes(amax, floor=1e-4).tolist(), strict=True):
        least = max(value, 1e-4)
        assert least / 2.0 ** (byte - 127) <= 448 < least / 2.0 ** (byte - 128)


def test_a_group_of_zeros_takes_the_floors_scale():
    rows = encode(torch.zeros(1, 512), V4)
    assert rows.scales is not None and rows.codes is not None
    assert rows.scales.tolist() == [[105] * 7] and not rows.codes.any()
    assert same(decode(rows, V4), torch.zeros(1, 512).bfloat16())


def test_v32_scales_are_fp32_powers_of_two():
    # FlashMLA#184: a writer of amax / 448 = 0.006696 is read differently by different kernels.
    values = torch.zeros(1, 576)
    values[0, :128] = 3.0
    rows = encode(values, V32)
    assert rows.scales is not None and rows.codes is not None
    assert rows.scales.view(torch.float32).tolist() == [[2.0**-7, 2.0**-13, 2.0**-13, 2.0**-13]]
    assert decode_e4m3(rows.codes[0, :2]).tolist() == [384, 384] and not rows.codes[0, 128:].any()


def test_v32_reads_any_fp32_scale():
    scales = torch.tensor([[0.75, 0.1, 0.006696, 3e-5]])
    codes = torch.cat([CODES[:128]] * 4)[None]
    rows = EncodedRows(
        raw=torch.zeros(1, 128, dtype=torch.uint8), codes=codes, scales=scales.view(torch.uint8)
    )
    got = decode(rows, V32)[0, :512].unflatten(0, (4, 128))
    assert got[0, 0x38] == 0.75  # wrong: 0.5 or 1.0, by way of UE8M0
    values = torch.tensor([e4m3(code) for code in range(128)])
    want = (values[None] * scales[0][:, None]).bfloat16()  # an fp32 product, rounded once more
    assert same(got, want)
    # FlashMLA's decode rounds the scale to bf16 first; the gather doesn't.
    assert not same(got, (values.bfloat16()[None] * scales[0].bfloat16()[:, None]).bfloat16())


@pytest.mark.parametrize("layout", [V4, V32])
def test_what_was_decoded_encodes_to_the_same_values(layout):
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (200, layout.quantised), generator=g, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    spread = torch.exp2(torch.randint(-8, 9, (200, layout.groups), generator=g).double())
    values = (decode_e4m3(codes).unflatten(1, (layout.groups, -1)) * spread[..., None]).flatten(1)
    values = torch.cat([values, torch.randn(200, 64, generator=g).double()], dim=1).bfloat16()
    assert torch.equal(decode(encode(values, layout), layout), values)


def test_rounding_stays_within_half_a_step_of_its_group():
    values = torch.randn(300, 512, generator=torch.Generator().manual_seed(2))
    rows = encode(values, V4)
    assert rows.scales is not None
    got = decode(rows, V4)
    error = (got[:, :448].double() - values[:, :448].double()).abs().unflatten(1, (7, 64))
    size = values[:, :448].double().abs().unflatten(1, (7, 64))
    scale = ue8m0_scales(rows.scales)[..., None]
    assert (error <= (size * 2**-4).maximum(scale * 2.0**-10)).all()
    assert torch.equal(got[:, 448:], values[:, 448:].bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_has_no_scale_is_refused_and_raw_columns_take_anything(bad):
    values = torch.zeros(3, 512)
    values[2, 447] = bad
    with pytest.raises(ValueError, match=r"^values: (nan|-?inf) in row 2, column 447; accepted"):
        encode(values, V4)
    values = torch.zeros(3, 512)
    values[2, 448] = bad
    assert same(decode(encode(values, V4), V4), values.bfloat16())
