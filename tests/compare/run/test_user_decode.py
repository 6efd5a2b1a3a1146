"""A function of one's own in the suites of decode."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import compare
from compare.judging.plans import DecodePlanResult
from compare.protocol.implementation import Unsupported
from compare.protocol.verdict import Status
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.table import make_inputs, parse_case
from compare.user.implementation import UserImplementation
from compare.user.own_tensors import as_inputs

CASE = parse_case("dcp-decode:lens=37+5,q=3+1,h=3,page=32,world=2,rank=1,kv=e4m3,pad_rows=1")
PLAN = parse_case("decode-plan:lens=9+4,q=2+1,world=2,rank=1,pad_rows=1")
BF16 = np.dtype(ml_dtypes.bfloat16)


def answer(q: Any, lse: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rows = tuple(q.shape[:2])
    return np.zeros((*rows, 512), BF16), np.full(rows, lse, np.float32)


def run(function: Callable[..., Any], case: Any = CASE) -> Any:
    return UserImplementation(function, device="cpu").run(make_inputs(case))


def test_a_function_gets_the_suite_s_arguments_as_torch_tensors_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def decode(
        q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, total_lens,
        dcp_rank, dcp_world, interleave, causal, kv_scale,
    ):  # fmt: skip
        seen.update(locals())
        return answer(q)

    assert isinstance(run(decode), DcpDecodeResult)
    assert seen["q"].dtype is torch.bfloat16 and seen["q"].shape == (5, 3, 576)
    assert seen["kv_cache"].dtype is torch.float8_e4m3fn
    assert seen["kv_cache"].shape[1:] == (32, 576)
    for name, values in (
        ("seq_lens", [18, 2]), ("query_start_loc", [0, 3, 4]), ("total_lens", [37, 5]),
    ):  # fmt: skip
        assert seen[name].dtype is torch.int32 and seen[name].tolist() == values
    assert seen["block_table"].dtype is torch.int32
    assert (seen["dcp_rank"], seen["dcp_world"], seen["interleave"]) == (1, 2, 1)
    assert seen["causal"] is True and seen["kv_scale"] == 3 / 256
    assert seen["sm_scale"] == 576**-0.5


FLOAT8_QUERIES = parse_case("dcp-decode:lens=37+5,q=3+1,h=3,kv=e4m3,q_dtype=e4m3")


def test_float8_queries_are_for_functions_that_take_their_scale() -> None:
    seen: list[Any] = []

    def named(q, block_table, q_scale, **_):
        seen.append((q.dtype, q_scale))
        return answer(q)

    def any_more(q, block_table, **more):
        seen.append((q.dtype, more.get("q_scale", "none was given")))
        return answer(q)

    for function in (named, any_more):
        assert UserImplementation(function).supports(FLOAT8_QUERIES) is None
        run(function, FLOAT8_QUERIES)
        run(function)
    scaled = (torch.float8_e4m3fn, 5 / 512)
    assert seen == [
        scaled, (torch.bfloat16, None), scaled, (torch.bfloat16, "none was given"),
    ]  # fmt: skip


def test_a_function_without_q_scale_is_given_no_float8_queries() -> None:
    def decode(
        q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, total_lens,
        dcp_rank, dcp_world, interleave, causal, kv_scale,
    ):  # fmt: skip
        return answer(q)

    sentence = "takes no argument 'q_scale', so it isn't for float8 queries"
    assert sentence in str(UserImplementation(decode).supports(FLOAT8_QUERIES))
    assert UserImplementation(decode).supports(CASE) is None
    with pytest.raises(Unsupported, match=sentence):
        run(decode, FLOAT8_QUERIES)


@pytest.mark.parametrize("framework", ["jax", "numpy"])
def test_other_frameworks_get_their_own_arrays(framework: str) -> None:
    @compare.candidate(framework=framework, device="cpu")
    def decode(q, kv_cache, block_table, **_):
        wanted = jax.Array if framework == "jax" else np.ndarray
        assert isinstance(q, wanted) and isinstance(kv_cache, wanted)
        assert kv_cache.dtype == ml_dtypes.float8_e4m3fn and block_table.dtype == np.int32
        return answer(q)

    assert isinstance(run(decode), DcpDecodeResult)


def test_lse_in_base_2_is_converted_and_said() -> None:
    @compare.candidate(lse="base2")
    def decode(q, block_table, **_):
        return answer(q, 3.0)

    result = run(decode)
    np.testing.assert_allclose(result.lse, 3 * np.log(2), rtol=1e-6)
    assert "declared base 2" in result.notes[0]


@pytest.mark.parametrize(
    ("declared", "given", "judged"),
    [
        (None, -np.inf, -np.inf),
        (None, np.inf, np.inf),
        ("-inf", -np.inf, -np.inf),
        ("+inf", np.inf, -np.inf),
        ("+inf", -np.inf, np.inf),
    ],
)
def test_an_empty_row_s_lse_is_minus_infinity_unless_declared_otherwise(
    declared: str | None, given: float, judged: float
) -> None:
    @compare.candidate(empty_lse=declared)
    def decode(q, block_table, **_):
        return answer(q, given)

    result = run(decode)
    assert (result.lse == judged).all()
    assert bool(result.notes) == (declared == "+inf")


@pytest.mark.parametrize(
    "shaped",
    [
        lambda out, lse: {"out": out, "lse": lse},
        lambda out, lse: SimpleNamespace(out=out, lse=lse),
        lambda out, lse: [torch.zeros(out.shape, dtype=torch.bfloat16), torch.from_numpy(lse)],
    ],
)
def test_a_mapping_an_object_and_tensors_are_results_too(shaped: Callable[..., Any]) -> None:
    result = run(lambda q, block_table, **_: shaped(*answer(q, 2.0)))
    assert result.out.dtype == BF16 and (result.lse == 2.0).all()


def test_three_parts_are_no_decode_result() -> None:
    with pytest.raises(TypeError, match=r"a tuple of 3; accepted: \(out, lse\)"):
        run(lambda q, block_table, **_: (*answer(q), None))


def test_a_planner_gets_its_arguments_and_the_group_if_it_names_it() -> None:
    seen: list[dict[str, Any]] = []

    def rows(query_start_loc, total_lens, *, max_query_len, causal, num_rows):
        seen.append(dict(locals()))
        return True, [0, 0, 1, 1], [8, 9, 4, 0], [0, 0, 0, 1]

    def with_group(*, max_query_len, dcp_rank, dcp_world, interleave, **others):
        seen.append({**others, "group": (dcp_rank, dcp_world, interleave)})
        plan = rows(**others, max_query_len=max_query_len)
        return SimpleNamespace(
            ragged=plan[0], request=plan[1], bound=plan[2], padding=plan[3],
            local_counts=np.array([1, 2, 3, 4]),
        )  # fmt: skip

    derived = run(rows, PLAN)
    assert derived == DecodePlanResult(
        ragged=True,
        request=(0, 0, 1, 1),
        bound=(8, 9, 4, 0),
        local_counts=(4, 4, 2, 0),
        padding=(False, False, False, True),
        notes=derived.notes,
    )
    assert "follow from its bounds" in derived.notes[0]
    seen[0].pop("seen", None)
    assert seen[0] == {
        "query_start_loc": (0, 2, 3), "total_lens": (9, 4), "max_query_len": 2, "causal": True,
        "num_rows": 4,
    }  # fmt: skip
    counted = run(with_group, PLAN)
    assert seen[1]["group"] == (1, 2, 1)
    assert counted.local_counts == (1, 2, 3, 4) and counted.notes == ()


def test_padding_may_be_the_number_of_rows_at_the_end() -> None:
    def planned(padding: Any) -> Callable[..., Any]:
        return lambda max_query_len, **_: (True, [0, 0, 1, 1], [8, 9, 4, 0], padding)

    for given in (1, np.int64(1), np.array(1), np.array([0, 0, 0, 1], bool)):
        assert run(planned(given), PLAN).padding == (False, False, False, True)
    for given in (5, -1, True, None, 0.5):
        with pytest.raises(TypeError, match="how many of the 4 rows, at the end, are padding"):
            run(planned(given), PLAN)


@pytest.mark.parametrize("name", ["jax_impl.planning", "torch_ref.planning"])
def test_the_planners_are_candidates_by_their_own_names(name: str) -> None:
    decode_rows = importlib.import_module(name).decode_rows
    assert compare.judge("decode-plan", PLAN, run(decode_rows, PLAN)).status is Status.PASS


def test_the_arguments_tell_the_suite() -> None:
    assert UserImplementation(lambda q, block_table, **_: None).suites == {"dcp-decode"}
    assert UserImplementation(lambda max_query_len, **_: None).suites == {"decode-plan"}


def test_tensors_of_one_s_own_are_inputs_of_decode() -> None:
    inputs = make_inputs(CASE)
    assert isinstance(inputs, DcpDecodeInputs)
    names = ("q", "kv_cache", "block_table", "seq_lens", "query_start_loc", "total_lens")
    given = {name: getattr(inputs, name) for name in names}
    made = as_inputs("dcp-decode", {**given, "sm_scale": 1, "kv_scale": 0.5, "dcp_world": 2})
    assert isinstance(made, DcpDecodeInputs)
    assert made.max_query_len == 3 and made.sm_scale == 1.0 and made.case is None
    assert (made.dcp_rank, made.dcp_world, made.causal, made.shards) == (0, 2, True, None)
    with pytest.raises(ValueError, match="total_lens is missing; dcp-decode needs it"):
        as_inputs("dcp-decode", {**given, "total_lens": None, "sm_scale": 1})
    with pytest.raises(ValueError, match="max_query_len: 2; accepted: 3 and more, the longest"):
        as_inputs("dcp-decode", {**given, "sm_scale": 1, "max_query_len": 2})
    with pytest.raises(ValueError, match="the nearest is 'kv_scale'"):
        as_inputs("dcp-decode", {**given, "sm_scale": 1, "kv_scales": 1})
    with pytest.raises(ValueError, match="there is no argument of dcp-decode 'shards'"):
        as_inputs("dcp-decode", {**given, "sm_scale": 1, "shards": ()})
