"""The cases that the interpreter takes by default: each shows something that no other one does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compare.protocol.case import Case
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.table import SUITES, default_cases, parse_case
from compare.suites.v4_prefill.case import V4PrefillCase
from compare.suites.v4_stages.case import V4StagesCase

MARKED = [
    (suite.name, offer.name) for suite in SUITES.values() for offer in suite.offers if offer.marked
]


def marked(suite: str, name: str = "pallas-interpret") -> list[Case]:
    offer = SUITES[suite].offer(name)
    assert offer is not None and offer.marked
    return [parse_case(line) for line in offer.marked]


@pytest.mark.parametrize(("suite", "name"), MARKED)
def test_each_is_a_default_case_as_list_writes_it_and_the_interpreter_takes_it(
    suite: str, name: str
) -> None:
    offer = SUITES[suite].offer(name)
    assert offer is not None and offer.marked
    known = {str(case): case for case in default_cases(suite)}
    implementation = offer.implementation("cpu")
    for line in offer.marked:
        assert line in known and implementation.supports(known[line]) is None


def test_every_interpreter_has_marked_cases() -> None:
    interpreted = [
        (suite.name, offer.name)
        for suite in SUITES.values()
        for offer in suite.offers
        if offer.name.endswith("-interpret")
    ]
    assert interpreted == MARKED


def test_of_sparse_prefill_what_the_kernel_tells_apart_is_among_them() -> None:
    cases = [case for case in marked("sparse-prefill") if isinstance(case, SparsePrefillCase)]
    tiles = {(-(-case.h // 64), case.h % 64 > 0) for case in cases}
    assert {tile for tile, _ in tiles} == {1, 2} and any(part for _, part in tiles)
    assert {case.d for case in cases} == {512, 576}
    assert any(case.topk % 128 for case in cases)
    pairs = {min(-(-case.topk // 128), 3) for case in cases}  # one pair of blocks, two, more
    assert pairs == {1, 2, 3}
    assert any(case.invalid and case.empty_rows for case in cases)
    assert {case.length for case in cases} >= {"ragged", "zero"}
    assert any(isinstance(case.length, int) and case.length % 64 for case in cases)
    assert any(case.sink == "mixed" for case in cases)
    assert any(case.data == "exact" for case in cases)


def test_of_decode_what_the_kernel_tells_apart_is_among_them() -> None:
    cases = [case for case in marked("dcp-decode") if isinstance(case, DcpDecodeCase)]
    assert {(case.kv, case.q_dtype) for case in cases} == {
        ("bf16", "bf16"),
        ("e4m3", "bf16"),
        ("e4m3", "e4m3"),
    }
    assert any(len(set(case.q)) > 1 for case in cases)
    assert any(case.data == "exact" for case in cases)
    assert any(max(case.lens) // case.world >= 512 for case in cases)  # shared by thread blocks
    assert any(case.stale for case in cases) and any(case.pad_rows for case in cases)


def test_of_the_v4_path_what_the_kernels_tell_apart_is_among_them() -> None:
    def batches(name: str) -> Iterator[V4PrefillCase]:
        for case in marked("v4-prefill", name):
            assert isinstance(case, V4PrefillCase)
            yield case

    fused = list(batches("pallas-fused-interpret"))
    assert {-(-case.h // 64) for case in fused} == {1, 2} and any(case.h % 64 for case in fused)
    assert any(case.data == "exact" for case in fused)
    assert any(case.slots > 128 for case in fused) and all(case.ratio > 1 for case in fused)
    assert any(0 in case.q for case in batches("pallas-interpret"))
    gathers = [case for case in marked("v4-stages") if isinstance(case, V4StagesCase)]
    assert {case.format for case in gathers} == {"bf16", "v4-fp8", "v3.2-fp8"}
    assert any(case.offset for case in gathers)
    assert {case.ratio > 1 for case in gathers} == {False, True}
