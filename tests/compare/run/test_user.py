from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import compare
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.plans import PlanChunk, PlanResult
from compare.protocol.implementation import UnknownImplementation
from compare.suites.table import SUITES, make_inputs, parse_case
from compare.user.candidate import CandidateOptions
from compare.user.implementation import UserImplementation
from compare.user.load import load
from tests.compare.run.conftest import PLAN_CASE

CASE = parse_case("sparse-prefill:s_q=3,s_kv=40,h=4,sink=mixed,length=ragged,strided=1")
BF16 = np.dtype(ml_dtypes.bfloat16)


def answer(q: Any, lse: Any = None) -> dict[str, Any]:
    """A result of the right shape in NumPy."""
    rows = tuple(q.shape[:2])
    return {
        "out": np.zeros((*rows, 512), BF16),
        "max_logits": np.zeros(rows, np.float32),
        "lse": np.zeros(rows, np.float32) if lse is None else lse,
    }


def run(function: Callable[..., Any], case: Any = CASE) -> SparsePrefillResult:
    result = UserImplementation(function, device="cpu").run(make_inputs(case))
    assert isinstance(result, SparsePrefillResult)
    return result


def test_a_function_gets_the_suite_s_arguments_as_torch_tensors_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def f(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
        seen.update(locals())
        return answer(q)

    run(f)
    inputs = make_inputs(CASE)
    assert isinstance(inputs, SparsePrefillInputs)
    assert seen["q"].dtype is torch.bfloat16 and seen["q"].shape == (3, 4, 512)
    assert seen["q"].stride() == tuple(s // 2 for s in inputs.q.strides)
    assert seen["kv"].shape == (40, 512) and seen["indices"].dtype is torch.int32
    assert seen["attn_sink"].shape == (4,) and seen["topk_length"].shape == (3,)
    assert seen["d_v"] == 512 and seen["sm_scale"] == inputs.sm_scale


def test_absent_sink_and_length_are_none() -> None:
    def f(q, attn_sink, topk_length, **_):
        assert attn_sink is None and topk_length is None
        return answer(q)

    run(f, parse_case("sparse-prefill:s_kv=40,h=4"))


@pytest.mark.parametrize(
    ("framework", "kind"), [("numpy", np.ndarray), ("jax", jnp.ndarray), ("torch", torch.Tensor)]
)
def test_the_decorator_chooses_whose_arrays_come(framework: str, kind: type) -> None:
    @compare.candidate(framework=framework, device="cpu" if framework == "jax" else None)
    def f(q, kv, indices, attn_sink, topk_length, **_):
        for array in (q, kv, indices, attn_sink, topk_length):
            assert isinstance(array, kind)
        assert "bfloat16" in str(q.dtype)
        return answer(q)

    run(f)


def test_a_function_may_write_to_its_arguments() -> None:
    inputs = make_inputs(CASE)
    before = inputs.sha256()

    for framework in ("torch", "numpy"):

        @compare.candidate(framework=framework)
        def f(q, kv, indices, **_):
            q[...], kv[...], indices[...] = 0, 0, 0
            return answer(q)

        UserImplementation(f, device="cpu").run(inputs)
    assert inputs.sha256() == before


@pytest.mark.parametrize("form", ["tuple", "list", "mapping", "object", "torch", "jax"])
def test_any_form_of_a_result_is_taken(form: str) -> None:
    def f(q, **_):
        found = answer(q)
        out = torch.zeros(3, 4, 512, dtype=torch.bfloat16)
        values = (found["out"], found["max_logits"], found["lse"])
        return {
            "tuple": lambda: values,
            "list": lambda: list(values),
            "mapping": lambda: found,
            "object": lambda: type("Result", (), found)(),
            "torch": lambda: (out, *map(torch.tensor, values[1:])),
            "jax": lambda: tuple(map(jnp.asarray, values)),
        }[form]()  # fmt: skip

    result = run(f)
    assert result.out.dtype == BF16 and result.out.shape == (3, 4, 512)
    assert result.max_logits is not None and result.lse.dtype == np.float32


def test_max_logits_may_be_left_out() -> None:
    assert run(lambda q, **_: (answer(q)["out"], None, answer(q)["lse"])).max_logits is None


def test_shapes_and_dtypes_are_handed_on_as_they_are() -> None:
    def f(**_):
        return np.zeros((1, 2), np.float16), np.zeros(3), np.zeros(5, np.int64)

    result = run(f)
    assert (result.out.shape, result.out.dtype) == ((1, 2), np.float16)
    assert (result.lse.shape, result.lse.dtype) == ((5,), np.int64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "returned a NoneType; accepted"),
        ((1, 2), "returned a tuple of 2; accepted"),
        ((None, None, None), "out is a builtins.NoneType"),
    ],
)
def test_what_is_no_result_is_a_type_error(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(lambda **_: given)


def test_base_2_becomes_natural_and_says_so() -> None:
    @compare.candidate(lse="base2")
    def f(q, **_):
        return answer(q, np.full((3, 4), 3.0, np.float32))

    result = run(f)
    assert result.lse.dtype == np.float32
    assert result.lse == pytest.approx(math.log(8))
    assert "base 2" in result.notes[0]


def test_a_declared_empty_lse_is_turned_and_the_other_sign_stays_wrong() -> None:
    @compare.candidate(empty_lse="-inf")
    def f(q, **_):
        lse = np.zeros((3, 4), np.float32)
        lse[0], lse[1, 0], lse[1, 1] = -np.inf, np.inf, np.nan
        return answer(q, lse)

    lse = run(f).lse
    assert (lse[0] == np.inf).all() and lse[1, 0] == -np.inf
    assert np.isnan(lse[1, 1]) and (lse[2] == 0).all()


def test_without_a_declaration_lse_is_untouched() -> None:
    lse = np.full((3, 4), -np.inf, np.float32)
    assert (run(lambda q, **_: answer(q, lse)).lse == -np.inf).all()


def test_supports_and_name_are_the_author_s() -> None:
    @compare.candidate(
        supports=lambda case: None if "h=4" not in str(case) else "64 heads only", name="ours"
    )
    def f(q, indices): ...

    implementation = UserImplementation(f, "file.py:f")
    assert implementation.name == "ours"
    assert implementation.supports(CASE) == "64 heads only"
    assert implementation.supports(parse_case("sparse-prefill:s_kv=40")) is None


def test_the_bare_decorator_is_the_default() -> None:
    @compare.candidate
    def f(indices): ...

    assert UserImplementation(f).options == CandidateOptions()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "tensorflow"}, "framework='tensorflow' isn't accepted; accepted: 'torch'"),
        ({"lse": "base10"}, "lse='base10'"),
        ({"empty_lse": "inf"}, "empty_lse='inf'"),
    ],
)
def test_options_outside_the_words_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.candidate(**options)  # type: ignore[arg-type]


def test_the_arguments_tell_the_suite() -> None:
    def prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length): ...
    def planner(seq_lens, query_lens, **_): ...
    def anything(q, **_): ...

    assert UserImplementation(prefill).suites == {"sparse-prefill"}
    assert UserImplementation(planner).suites == {"prefill-plan"}
    assert UserImplementation(anything).suites == frozenset(SUITES)
    reason = UserImplementation(prefill).supports(parse_case(PLAN_CASE))
    assert reason is not None and "takes no argument 'query_lens'" in reason


def test_a_planner_gets_plain_lengths_and_gives_objects_or_tuples() -> None:
    chunk = PlanChunk(
        start=0, end=1, compressed_rows=2, workspace_rows=3, query_start=0, query_end=5
    )

    def f(seq_lens, query_lens, compress_ratio, window, max_model_len, **_):
        assert (seq_lens, query_lens) == ((40, 40, 16), (5, 0, 3))
        assert (compress_ratio, window, max_model_len) == (4, 8, 64)
        return [chunk, (np.int64(0), 1, 2, 3, 0, 5)]

    result = UserImplementation(f).run(make_inputs(parse_case(PLAN_CASE)))
    assert result == PlanResult(chunks=(chunk, chunk))


@pytest.mark.parametrize(
    ("words", "given"), [("", None), (",compressed=1", True), (",compressed=0", False)]
)
def test_a_planner_is_told_of_compressed_rows_only_where_the_case_says_so(words, given) -> None:
    got = []

    def f(query_lens, has_compressed, **_):
        got.append(has_compressed)
        return []

    UserImplementation(f).run(make_inputs(parse_case(PLAN_CASE + words)))
    assert got == [given]


def test_a_chunk_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match="a tuple as chunk 0; accepted: an object with start, end"):
        UserImplementation(lambda **_: [(1, 2)], "mine").run(make_inputs(parse_case(PLAN_CASE)))


def test_a_batch_runs_chunk_by_chunk() -> None:
    tokens = []

    def f(q, **_):
        tokens.append(len(q))
        return answer(q)

    case = parse_case("sparse-prefill:q_lens=0+5+0+3,plan=vllm-0.33.0,s_kv=40,h=4")
    assert run(f, case).out.shape == (8, 4, 512)
    assert sorted(tokens) == [0, 0, 3, 5]


class TestNames:
    def test_a_file_finds_its_neighbours(
        self, candidate_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend("/nowhere")  # sys.path is put back after the test
        candidate_file("VALUE = 41", "neighbour_of_mine.py")
        path = candidate_file("from neighbour_of_mine import VALUE\ndef f(): return VALUE + 1")
        assert load(f"{path}:f")() == 42

    def test_a_module_is_looked_for_in_the_working_directory(
        self, candidate_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend("/nowhere")
        path = candidate_file(
            "class Kernels:\n    @staticmethod\n    def f(): return 42", "module_of_mine.py"
        )
        monkeypatch.chdir(path.parent)
        assert load("module_of_mine:Kernels.f")() == 42

    def test_a_file_called_like_a_module_does_not_take_its_place(
        self, candidate_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend("/nowhere")
        path = candidate_file("def f(): return 42", "json.py")
        assert load(f"{path}:f")() == 42
        import json

        assert json.loads("1") == 1

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("{file}:attnd", "has no function 'attnd'; the nearest is 'attend'"),
            ("{file}:VALUE", "is a int, not a function"),
            ("no_such.py:f", "there is no file no_such.py"),
            ("no_such_package.kernels:f", "there is no module 'no_such_package'"),
            ("json.no_such:f", "there is no module 'json.no_such'"),
            ("{file}:", "write MODULE:FUNCTION"),
        ],
    )
    def test_words_that_are_off(
        self,
        name: str,
        message: str,
        candidate_file: Callable[[str], Path],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.syspath_prepend("/nowhere")
        path = candidate_file("VALUE = 1\ndef attend(**_): ...")
        with pytest.raises(UnknownImplementation, match=message):
            load(name.format(file=path))

    def test_a_missing_import_of_the_module_is_its_own_error(
        self, candidate_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend("/nowhere")
        path = candidate_file("import no_such_library", "needs_more.py")
        monkeypatch.chdir(path.parent)
        with pytest.raises(ModuleNotFoundError, match="no_such_library"):
            load("needs_more:f")
