"""A case line is its own reproducer, and a wrong one is refused by name."""

import pytest

from compare.protocol.case import CaseError
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.decode_plan.case import DecodePlanCase
from compare.suites.table import SUITES, default_cases, full_cases, parse_case


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
        ("dcp-decode:lens=1+2,q=1", "lens has 2 requests and q has 1"),
        ("dcp-decode:lens=9,q=4,max_q=3", "request 0 has q=4 tokens and max_q=3"),
        ("dcp-decode:lens=9,q=1,world=2,rank=2", "rank=2 of world=2; accepted are 0 to 1"),
        ("dcp-decode:lens=9,q=1,rank=al", "accepted: all | a whole number from 0"),
        ("dcp-decode:lens=9,q=1,page=64,interleave=48", "interleave=48 doesn't divide page=64"),
        ("dcp-decode:lens=9,q=1,h=0", "a whole number from 1 to 128"),
        ("dcp-decode:lens=9,q=1,kv=fp8", "bf16 | e4m3"),
        ("dcp-decode:lens=9,q=1,q_dtype=e4m3", "q_dtype=e4m3 with kv=bf16; float8 queries go with"),
        ("dcp-decode:lens=9,q=1,data=exact,world=3", "a power of two"),
        (
            "dcp-decode:lens=9,q=4,data=exact,world=8",
            "the keys of a request's first token (8 here)",
        ),
        ("dcp-decode:lens=99,q=17,data=exact", "at most q=16 tokens"),
        ("dcp-decode:lens=99,q=1,data=exact,sm_scale=-1.0", "a positive sm_scale"),
        ("decode-plan:lens=9,q=1,rank=all", "accepted: a whole number from 0"),
        ("decode-plan:lens=99999999999999999999,q=1", "whole numbers from 0 to 2147483647 joined"),
        ("decode-plan:lens=9,q=1,interleave=2147483648", "a whole number from 1 to 2147483647"),
        ("decode-plan:lens=9,q=1,pad_rows=2147483647", "2147483648 rows; accepted are up to 10485"),
        ("dcp-decode:lens=2147483648,q=1", "whole numbers from 0 to 2147483647 joined"),
        ("prefill-plan:seq=2147483648,q=1", "whole numbers from 0 to 2147483647 joined"),
        ("decode-plan:lens=9,q=1,rank=5", "rank=5 of world=2"),
    ],
)
def test_a_wrong_line_is_refused_and_told_what_is_accepted(line: str, words: str) -> None:
    with pytest.raises(CaseError) as caught:
        parse_case(line)
    assert words in str(caught.value)


@pytest.mark.parametrize("suite", list(SUITES))
def test_every_catalogued_case_reads_back_and_stands_once(suite: str) -> None:
    for cases in (default_cases(suite), full_cases(suite)):
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


def test_a_decode_line_is_canonical_and_may_have_fewer_keys_than_tokens() -> None:
    case = parse_case("dcp-decode:rank=all,q=4+1,world=2,lens=1+9,max_q=8,causal=0,h=16")
    assert str(case) == "dcp-decode:lens=1+9,q=4+1,world=2,rank=all,causal=0,max_q=8"
    assert parse_case(str(case)) == case


def test_the_default_cases_of_decode_are_those_that_the_fix_was_proven_on_and_more() -> None:
    cases = [case for case in default_cases("dcp-decode") if isinstance(case, DcpDecodeCase)]
    single = {(c.lens[0], c.q[0], c.rank) for c in cases if len(c.lens) == 1 and c.world == 2}
    proven = {(301, 8), (97, 8), (130, 4), (64, 1)}
    assert single >= {(total, q, rank) for total, q in proven for rank in (0, 1)}
    assert {c.q for c in cases} >= {(8, 1), (8, 2), (3, 1), (6, 2, 1)}
    assert any(c.q == (8, 2) and c.pad_rows == 6 for c in cases)
    assert {c.world for c in cases} == {1, 2, 3, 4, 8}
    assert {c.interleave for c in cases} == {1, 4, 64}
    assert {c.h for c in cases} >= {128, 64, 16, 6} and {c.page for c in cases} == {32, 64, 128}
    assert {c.data for c in cases} == {"normal", "flat", "peaked", "exact"}
    assert {(c.kv, c.q_dtype) for c in cases} == {
        ("bf16", "bf16"),
        ("e4m3", "bf16"),
        ("e4m3", "e4m3"),
    }
    assert any(not c.causal for c in cases)
    assert sum(c.rank == "all" for c in cases) >= 5 and any(c.stale for c in cases)
    assert any(t < q for c in cases for t, q in zip(c.lens, c.q, strict=True))
    assert any(c.keys_of(r, t) == 0 < t for c in cases for r in c.ranks for t in c.lens)
    # The float64 oracle is to take seconds for all of them on a laptop.
    assert sum(c.flop for c in cases) < 1e10


def test_the_default_plans_hold_the_batches_of_the_fix_and_as_many_drawn() -> None:
    cases = [case for case in default_cases("decode-plan") if isinstance(case, DecodePlanCase)]
    assert len(cases) >= 60
    assert {(c.lens, c.q) for c in cases} >= {((301, 97), (8, 1)), ((20, 9, 4), (6, 2, 1))}
    assert any(c.q == (8, 2) and c.pad_rows == 6 for c in cases)
    assert {c.causal for c in cases} == {True, False} and {c.world for c in cases} >= {1, 2, 4, 8}
