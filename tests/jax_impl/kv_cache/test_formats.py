"""The table of layouts: its numbers, and addresses past 2^31 bytes."""

from __future__ import annotations

import pytest

from jax_impl.kv_cache import FORMATS
from jax_impl.kv_cache.formats import Field, format_named
from tests.jax_impl.kv_cache.model import STRIDES, WIDTHS

V4, V32 = FORMATS["v4-fp8"], FORMATS["v3.2-fp8"]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("page_size", [1, 2, 3, 53, 64, 256])
def test_widths_and_page_strides(name, page_size):
    layout = FORMATS[name]
    assert layout.name == name
    assert layout.d == WIDTHS[name]
    assert layout.page_stride(page_size) == STRIDES[name](page_size)


@pytest.mark.parametrize(("page_size", "stride"), [(64, 37440), (2, 1728), (256, 149760)])
def test_a_v4_page_is_padded_to_576(page_size, stride):
    assert V4.page_stride(page_size) == stride


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_v4_keeps_scales_behind_the_data_of_all_tokens(page_size):
    assert V4.quantised is not None
    codes, scales, plain = V4.quantised.codes, V4.quantised.scales, V4.plain
    (pad,) = V4.padding
    last = page_size - 1
    assert V4.byte_offset(codes, page_size, last) == last * 576
    assert V4.byte_offset(plain, page_size, last) == last * 576 + 448
    assert V4.byte_offset(scales, page_size, last) == page_size * 576 + last * 8
    assert V4.byte_offset(pad, page_size, last) == page_size * 576 + last * 8 + 7
    assert (codes.size, plain.size, scales.size, pad.size) == (448, 128, 7, 1)
    assert (V4.quantised.groups, V4.quantised.group) == (7, 64)


def test_v32_keeps_a_token_together():
    assert V32.quantised is not None
    places = [
        (field.size, V32.byte_offset(field, 64, 3) - 3 * 656)
        for field in (V32.quantised.codes, V32.quantised.scales, V32.plain)
    ]
    assert places == [(512, 0), (16, 512), (128, 528)]
    assert (V32.quantised.groups, V32.quantised.group) == (4, 128)


def _fields(name: str) -> list[Field]:
    layout = FORMATS[name]
    quantised = (
        [] if layout.quantised is None else [layout.quantised.codes, layout.quantised.scales]
    )
    return [*quantised, layout.plain, *layout.padding]


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("page_size", [1, 2, 5, 64])
def test_fields_cover_every_byte_of_every_token_once(name, page_size):
    layout = FORMATS[name]
    used = [
        layout.byte_offset(field, page_size, slot) + i
        for slot in range(2 * page_size)
        for field in _fields(name)
        for i in range(field.size)
    ]
    stride, filled = layout.page_stride(page_size), page_size * layout.token_bytes
    expected = [page * stride + i for page in range(2) for i in range(filled)]
    assert sorted(used) == expected


@pytest.mark.parametrize(
    ("layout", "page", "offset"),
    [
        (V32, 51150, 2147481600),
        (V32, 51151, 2147523584),
        (V4, 57358, 2147483520),
        (V4, 57359, 2147520960),
    ],
)
def test_page_offsets_do_not_wrap_at_two_gigabytes(layout, page, offset):
    assert layout.byte_offset(layout.quantised.codes, 64, page * 64) == offset


def test_a_name_that_is_no_format_is_refused():
    for name in ("v4", "V4-FP8", None, 4):
        with pytest.raises(ValueError, match=r"kv_format must be one of v4-fp8, v3\.2-fp8, bf16"):
            format_named(name)
