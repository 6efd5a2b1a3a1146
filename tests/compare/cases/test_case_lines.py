"""A case line is its own reproducer, and a wrong one is refused by name."""

import pytest

from compare.cases.case import CaseError
from compare.cases.catalogue import default_cases, full_cases
from compare.suites import parse_case


def test_a_line_is_canonical_and_reads_back() -> None:
    case = parse_case(
        "sparse-prefill:topk=256,s_q=3,seed=7,s_kv=256,sink=0.5,invalid=0.25,strided=1"
    )
    line = "sparse-prefill:s_q=3,topk=256,sink=0.5,invalid=0.25,strided=1,seed=7"
    assert str(case) == line
    assert parse_case(line) == case


def test_lists_use_plus() -> None:
    case = parse_case("sparse-prefill:q_lens=0+5+0,plan=fixed")
    assert case.q_lens == (0, 5, 0) and case.tokens == 5
    assert str(case) == "sparse-prefill:q_lens=0+5+0,plan=fixed"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sparse-prefil:s_q=1", "'sparse-prefill'"),
        ("sparse-prefill:s_k=1", "'s_kv'"),
        ("sparse-prefill:s_q=1,s_q=2", "s_q is given twice"),
        ("sparse-prefill:s_q", "s_q=VALUE"),
        ("sparse-prefill:s_q=-1", "a whole number from 0"),
        ("sparse-prefill:h=129", "from 1 to 128"),
        ("sparse-prefill:d=640", "512 | 576"),
        ("sparse-prefill:sm_scale=inf", "auto | a finite number"),
        ("sparse-prefill:sink=maybe", "none | mixed | zero"),
        ("sparse-prefill:length=-3", "a whole number from 0 to topk"),
        ("sparse-prefill:length=129", "length=129 exceeds topk=128"),
        ("sparse-prefill:invalid=1.5", "from 0 to 1"),
        ("sparse-prefill:q_lens=1+2", "q_lens and plan come together"),
        ("sparse-prefill:q_lens=1,plan=fixed,s_q=3", "s_q is the sum of q_lens"),
        ("sparse-prefill:empty_rows=2", "empty_rows=2 exceeds the 1 tokens"),
        ("sparse-prefill:data=exact,sink=0.5", "data=exact takes sink none or -inf"),
        ("sparse-prefill:data=exact,s_kv=3", "data=exact needs s_kv >= 8"),
        ("sparse-prefill", "names a suite without a case"),
        ("prefill-plan:seq=1+2,q=1", "seq has 2 requests and q has 1"),
        ("prefill-plan:seq=3,q=4", "request 0 has q=4 tokens of seq=3"),
    ],
)
def test_a_wrong_line_is_refused_and_told_what_is_accepted(line: str, words: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_case(line)
    assert words in str(caught.value)


def test_every_catalogued_case_reads_back_and_stands_once() -> None:
    for cases in (default_cases("sparse-prefill"), full_cases("sparse-prefill")):
        lines = [str(case) for case in cases]
        assert len(set(lines)) == len(lines)
        assert [parse_case(line) for line in lines] == list(cases)


def test_the_default_cases_cover_what_a_golden_must() -> None:
    cases = default_cases("sparse-prefill")
    assert len(cases) >= 40
    assert {(c.d, c.h) for c in cases} >= {(d, h) for d in (512, 576) for h in (64, 128)}
    assert min(c.topk for c in cases) <= 128 and max(c.topk for c in cases) == 2048
    assert {c.data for c in cases} >= {"flashmla", "normal", "flat", "peaked", "exact"}
    assert any(c.q_lens for c in cases) and any(c.order == "dup" for c in cases)
    assert any(c.empty_rows for c in cases) and any(c.strided for c in cases)
