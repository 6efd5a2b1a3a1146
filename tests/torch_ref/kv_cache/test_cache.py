"""Where bytes lie in a page, and that writing touches no others."""

from __future__ import annotations

import pytest
import torch

from torch_ref.kv_cache import (
    FORMATS,
    PagedKV,
    divergent_scales,
    empty_cache,
    insert_kv,
    read_kv,
)


def rows(count: int, width: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "P", "stride"),
    [
        ("v4-fp8", 64, 37440),
        ("v4-fp8", 2, 1728),
        ("v4-fp8", 256, 149760),
        ("v4-fp8", 1, 1152),
        ("v4-fp8", 53, 31104),
        ("v3.2-fp8", 64, 41984),
        ("bf16", 64, 65536),
        ("bf16-576", 64, 73728),
    ],
)
def test_page_strides(name, P, stride):
    assert FORMATS[name].page_bytes(P) == stride
    assert FORMATS[name].page_bytes(P) % 16 == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("P", [1, 2, 53, 64])
def test_the_regions_of_a_page_tile_its_tokens(name, P):
    layout = FORMATS[name]
    parts = [layout.raw, layout.codes, layout.scales, layout.padding]
    seen = [
        part.start(P) + p * part.stride + i
        for part in parts
        if part is not None
        for p in range(P)
        for i in range(part.size)
    ]
    assert sorted(seen) == list(range(P * layout.token_bytes))
    assert 0 <= layout.page_bytes(P) - P * layout.token_bytes < layout.page_multiple


def test_a_v4_token_lies_where_the_format_says():
    P, page, p = 64, 2, 5
    cache = empty_cache("v4-fp8", num_pages=3, page_size=P, fill=0xA5)
    values = torch.zeros(1, 512)
    values[0, :64], values[0, 64:128], values[0, 448:] = 1.0, 2.0, 3.0
    written = insert_kv(cache, values, slots(page * P + p)).cache[page]
    # 1 * 448 / 448 <= 2^-8 * 256: amax 1 takes 2^-8, and so code 256, 0x78; amax 2 takes 2^-7.
    data, scale = p * 576, P * 576 + p * 8
    assert written[data : data + 448].tolist() == [0x78] * 128 + [0x00] * 320
    assert written[data + 448 : data + 576].view(torch.bfloat16).tolist() == [3.0] * 64
    assert written[scale : scale + 8].tolist() == [119, 120, 105, 105, 105, 105, 105, 0]


def test_a_v32_token_lies_where_the_format_says():
    cache = empty_cache("v3.2-fp8", num_pages=2, page_size=3, fill=0xA5)
    values = torch.zeros(1, 576)
    values[0, 128:256], values[0, 512:] = 1.0, 3.0
    written = insert_kv(cache, values, slots(4)).cache[1][656 : 2 * 656]
    assert written[128:256].tolist() == [0x78] * 128 and not written[:128].any()
    want = [2.0**-13, 2.0**-8, 2.0**-13, 2.0**-13]
    assert written[512:528].view(torch.float32).tolist() == want
    assert written[528:].view(torch.bfloat16).tolist() == [3.0] * 64


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("P", [1, 2, 53])
def test_writing_touches_the_bytes_of_its_tokens_alone(name, P):
    layout = FORMATS[name]
    cache = empty_cache(name, num_pages=4, page_size=P, fill=0xA5)
    at = slots(3 * P, -1, P + P // 2, -1)
    written = insert_kv(cache, rows(4, layout.columns), at)
    assert torch.equal(
        cache.cache.view(torch.uint8), torch.full_like(cache.cache.view(torch.uint8), 0xA5)
    )
    changed = (written.cache.view(torch.uint8) != 0xA5).reshape(4, -1)
    allowed = torch.zeros(4, layout.page_bytes(P), dtype=torch.bool)
    for slot in (3 * P, P + P // 2):
        for part in (layout.raw, layout.codes, layout.scales, layout.padding):
            if part is not None:
                start = part.start(P) + slot % P * part.stride
                allowed[slot // P, start : start + part.size] = True
    assert not (changed & ~allowed).any() and changed.sum() > 0.9 * allowed.sum()
    if layout.padding is not None:
        assert (written.region(layout.padding)[[3, 1], [0, P // 2]] == 0).all()


@pytest.mark.parametrize("name", ["bf16", "bf16-576"])
def test_bf16_caches_give_back_what_was_written(name):
    values = rows(5, FORMATS[name].columns)
    paged = insert_kv(empty_cache(name, num_pages=3, page_size=2), values, slots(5, 0, 3, 1, 2))
    assert torch.equal(read_kv(paged, slots(5, 0, 3, 1, 2)), values)
    assert torch.equal(paged.cache.flatten(0, 1)[5], values[0])


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_slots_of_any_shape_and_leaves_poison_where_it_is(name):
    D = FORMATS[name].columns
    cache = empty_cache(name, num_pages=3, page_size=4, fill=0xFF)
    paged = insert_kv(cache, rows(3, D), slots(2, 11, 4))
    assert read_kv(paged, slots(0, 1, 3)).isnan().all()
    read = read_kv(paged, slots(4, 2, 2, 11).reshape(2, 2, 1))
    assert read.shape == (2, 2, 1, D) and not read.isnan().any()
    assert torch.equal(read[1, 0, 0], read[0, 1, 0])
    assert read_kv(paged, slots().reshape(2, 0)).shape == (2, 0, D)


@pytest.mark.parametrize("name", FORMATS)
def test_one_logical_cache_reads_alike_at_every_page_size(name):
    values, want = rows(12, FORMATS[name].columns), None
    for P in (1, 2, 3, 12):
        cache = empty_cache(name, num_pages=12 // P, page_size=P, fill=0xFF)
        read = read_kv(insert_kv(cache, values, slots(*range(12))), slots(*range(12)))
        want = read if want is None else want
        assert torch.equal(read, want)


@pytest.mark.parametrize("name", FORMATS)
def test_pages_may_lie_apart(name):
    paged = insert_kv(
        empty_cache(name, num_pages=4, page_size=2),
        rows(8, FORMATS[name].columns),
        slots(*range(8)),
    )
    apart = PagedKV(paged.cache.repeat_interleave(3, dim=0)[1::3], 2, name)
    assert apart.cache.stride(0) == 3 * paged.cache.stride(0)
    assert torch.equal(read_kv(apart, slots(*range(8))), read_kv(paged, slots(*range(8))))


def test_page_addresses_do_not_wrap_at_32_bits():
    # vllm#47671: page 57359 starts at byte 2147520960, which is -2147446336 in 32 bits. Only the
    # pages that are touched take memory.
    paged = PagedKV(torch.empty(57360, 37440, dtype=torch.uint8), 64, "v4-fp8")
    small = insert_kv(empty_cache("v4-fp8", num_pages=1, page_size=64), rows(64), slots(*range(64)))
    paged.cache[57359] = small.cache[0]
    at = torch.arange(64, dtype=torch.int32)
    assert torch.equal(read_kv(paged, at + 57359 * 64), read_kv(small, at))
    first = paged.region(paged.layout.raw)[57359, 0].data_ptr() - paged.cache.data_ptr()
    assert first == 2147520960 + 448


def test_scales_that_readers_disagree_on_are_named():
    paged = insert_kv(empty_cache("v3.2-fp8", num_pages=1, page_size=2), rows(2, 576), slots(0, 1))
    assert not divergent_scales(paged, slots(0, 1)).any()
    assert paged.layout.scales is not None
    scales = torch.tensor([0.75, 1.0, 0.006696, 2.0**-20])
    paged.region(paged.layout.scales)[0, 1] = scales.view(torch.uint8)
    want = [[False] * 4, [True, False, True, False]]
    assert divergent_scales(paged, slots(0, 1)).tolist() == want
    v4 = empty_cache("v4-fp8", num_pages=1, page_size=2, fill=77)
    assert divergent_scales(v4, slots(1)).tolist() == [[False] * 7]
    assert divergent_scales(empty_cache("bf16", num_pages=1, page_size=2), slots(1)).shape == (1, 0)


@pytest.mark.parametrize(
    ("cache", "page_size", "kv_format", "message"),
    [
        (torch.zeros(2, 37376, dtype=torch.uint8), 64, "v4-fp8", "cache: shape [2, 37376]"),
        (torch.zeros(2, 37440, dtype=torch.uint8), 32, "v4-fp8", "cache: shape [2, 37440]"),
        (torch.zeros(2, 64, 584, dtype=torch.uint8), 64, "v4-fp8", "cache: shape [2, 64, 584]"),
        (torch.zeros(2, 37440, dtype=torch.int8), 64, "v4-fp8", "cache: dtype torch.int8"),
        (torch.zeros(2, 4, 512), 4, "bf16", "cache: dtype torch.float32"),
        (torch.zeros(2, 4, 576).bfloat16(), 4, "bf16", "cache: shape [2, 4, 576]"),
        (torch.zeros(2, 4, 512).bfloat16(), 2, "bf16", "cache: shape [2, 4, 512]"),
        (torch.zeros(2, 8).byte()[:, ::2], 0, "v4-fp8", "page_size: 0"),
        (torch.zeros(2, 2304).byte()[:, ::2], 1, "v4-fp8", "cache: strides [2304, 2]"),
        (torch.zeros(2, 1152).byte(), 1, "fp8", "kv_format: 'fp8'; accepted are v4-fp8"),
    ],
)
def test_caches_that_do_not_fit_their_format_are_refused(cache, page_size, kv_format, message):
    with pytest.raises(ValueError) as error:
        PagedKV(cache, page_size, kv_format)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (slots(0, 8), "slot_mapping: 8; accepted are slots 0 to 7 and -1"),
        (slots(0, -2), "slot_mapping: -2; accepted are slots 0 to 7 and -1"),
        (slots(3, 3), "slot_mapping: slot 3 is given 2 times"),
        (slots(3), r"slot_mapping: shape [1]; values has 2 rows"),
        (torch.zeros(2), "slot_mapping: dtype torch.float32"),
    ],
)
def test_slots_that_cannot_be_written_are_refused(mapping, message):
    cache = empty_cache("v4-fp8", num_pages=4, page_size=2)
    with pytest.raises(ValueError) as error:
        insert_kv(cache, rows(2), mapping)
    assert str(error.value).startswith(message)


def test_other_misfits_are_refused():
    cache = empty_cache("v4-fp8", num_pages=4, page_size=2)
    with pytest.raises(ValueError, match=r"^values: shape \[2, 576\]; accepted is \[N, 512\]"):
        insert_kv(cache, rows(2, 576), slots(0, 1))
    with pytest.raises(ValueError, match=r"^values: dtype torch.float64"):
        insert_kv(cache, rows(2).double(), slots(0, 1))
    for bad in (-1, 8):
        with pytest.raises(ValueError, match=rf"^slots: {bad}; accepted are slots 0 to 7$"):
            read_kv(cache, slots(0, bad))
    with pytest.raises(ValueError, match=r"^fill: 256"):
        empty_cache("v4-fp8", num_pages=1, page_size=2, fill=256)
    with pytest.raises(ValueError, match=r"^num_pages: -1"):
        empty_cache("v4-fp8", num_pages=-1, page_size=2)
    with pytest.raises(ValueError, match=r"^page_size: 0"):
        empty_cache("v4-fp8", num_pages=1, page_size=0)


def test_a_cache_without_pages_is_one_without_slots():
    cache = empty_cache("v4-fp8", num_pages=0, page_size=2)
    assert read_kv(cache, slots()).shape == (0, 512)
    assert insert_kv(cache, rows(1), slots(-1)).num_slots == 0
