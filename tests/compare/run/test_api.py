from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import compare
import torch_ref
from compare.judging.attention_call import SparsePrefillInputs
from compare.protocol.verdict import Status, Verdict
from compare.suites.table import make_inputs, parse_case
from compare.user.own_tensors import as_inputs

CASE = "sparse-prefill:s_q=2,s_kv=40,h=4,sink=mixed,length=ragged"
PLAN = "prefill-plan:seq=40+40+16,q=5+0+3,window=8,max_len=64,max_tokens=16,chunk=1"


def tensors() -> dict[str, Any]:
    """Tensors of one's own, in torch and in the layout of FlashMLA's interface."""
    generator = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(3, 4, 512, generator=generator).bfloat16(),
        "kv": torch.randn(40, 1, 512, generator=generator).bfloat16(),
        "indices": torch.randint(-1, 40, (3, 1, 64), generator=generator, dtype=torch.int32),
        "sm_scale": 0.05,
        "attn_sink": torch.zeros(4),
    }


def right(own: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    result = torch_ref.sparse_prefill(**own)
    return result.out, result.max_logits, result.lse


@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        ("compare.candidate", "torch jax numpy rich"),
        ("compare.judge, compare.check, compare.assert_agrees", "torch jax"),
    ],
)
def test_neither_importing_nor_naming_a_function_brings_torch_or_jax(
    names: str, heavy: str
) -> None:
    code = f"import sys, compare; {names}; print(sorted(set({heavy.split()}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_judge_is_a_function_and_no_module_shares_its_name() -> None:
    assert inspect.isfunction(compare.judge)
    assert importlib.util.find_spec("compare.judge") is None


def test_the_version_is_named() -> None:
    assert compare.__version__.startswith("0.")


def test_a_right_result_on_one_s_own_tensors_passes() -> None:
    own = tensors()
    verdict = compare.judge("sparse-prefill", own, right(own), device="cpu")
    assert isinstance(verdict, Verdict)
    assert verdict.status is Status.PASS
    compare.assert_agrees("sparse-prefill", own, right(own), device="cpu")


def test_numpy_and_jax_arrays_are_as_good() -> None:
    own = tensors()
    out, max_logits, lse = right(own)
    numpy = {
        "q": np.asarray(own["q"].float()).astype(ml_dtypes.bfloat16),
        "kv": jnp.asarray(own["kv"][:, 0].float().numpy(), jnp.bfloat16),
        "indices": own["indices"][:, 0].numpy(),
        "sm_scale": np.float32(0.05),
        "attn_sink": np.zeros(4, np.float32),
    }
    result = {"out": out, "max_logits": max_logits, "lse": jnp.asarray(lse.numpy())}
    assert compare.judge("sparse-prefill", numpy, result, device="cpu").status is Status.PASS


def test_a_wrong_result_is_an_assertion_error_with_the_verdict_in_words() -> None:
    own = tensors()
    out, max_logits, lse = right(own)
    with pytest.raises(AssertionError) as raised:
        compare.assert_agrees(
            "sparse-prefill", own, (out, max_logits, lse * 1.442695), device="cpu"
        )
    text = str(raised.value)
    assert "NUMERIC" in text and "lse-base-2" in text and "lse[" in text
    assert "reproduce" not in text


def test_a_reference_may_be_a_result_or_a_name() -> None:
    own = tensors()
    for reference in (right(own), "xla"):
        verdict = compare.judge(
            "sparse-prefill", own, right(own), reference=reference, device="cpu"
        )
        assert verdict.status is Status.PASS
        assert set(verdict.against_reference) >= {"out", "lse"}


def test_a_reference_that_is_wrong_itself_fails_the_assertion() -> None:
    own = tensors()
    out, max_logits, lse = right(own)
    with pytest.raises(AssertionError, match="the reference"):
        compare.assert_agrees(
            "sparse-prefill", own, right(own), reference=(out * 2, max_logits, lse), device="cpu"
        )


def test_a_case_line_stands_for_its_inputs() -> None:
    inputs = make_inputs(parse_case(CASE))
    assert isinstance(inputs, SparsePrefillInputs)
    found = as_inputs("sparse-prefill", CASE)
    assert isinstance(found, SparsePrefillInputs) and found.sha256() == inputs.sha256()


def test_a_plan_of_one_s_own_is_judged_by_its_rules() -> None:
    batch = dict(
        seq_lens=torch.tensor([40, 40]), query_lens=[0, 5], compress_ratio=4, window=8,
        max_model_len=64, max_num_batched_tokens=16, chunk_size=1,
    )  # fmt: skip
    assert compare.judge("prefill-plan", batch, [(1, 2, 10, 22, 0, 5)]).status is Status.PASS
    empty_chunk = [(0, 1, 10, 17, 0, 0), (1, 2, 10, 22, 0, 5)]
    assert compare.judge("prefill-plan", batch, empty_chunk).status.failed


@pytest.mark.parametrize("word", [1.5, 1.0, "1", float("nan")])
def test_a_plan_that_is_not_of_whole_numbers_is_not_cut_to_them(word: object) -> None:
    with pytest.raises(TypeError, match=r"chunk 0 of result: .*; accepted: whole numbers"):
        compare.judge("prefill-plan", "prefill-plan:seq=40+40,q=0+5", [(word, 2, 10, 22, 0, 5)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": [40.7, 40]}, r"seq_lens: \[40.7, 40\]; accepted: whole numbers"),
        ({"seq_lens": [40]}, "query_lens: 2 requests; seq_lens has 1"),
        ({"query_lens": [0, 41]}, r"query_lens\[1\]: 41; accepted: 0 to the request's length, 40"),
        ({"compress_ratio": 4.5}, "compress_ratio: 4.5; accepted: whole numbers"),
        ({"window": 0}, "window: 0; accepted: 1 and more"),
    ],
)
def test_a_batch_that_no_planner_may_be_given_is_refused(
    change: dict[str, Any], message: str
) -> None:
    batch: dict[str, Any] = dict(
        seq_lens=[40, 40], query_lens=[0, 5], compress_ratio=4, window=8,
        max_model_len=64, max_num_batched_tokens=16, chunk_size=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        compare.judge("prefill-plan", batch | change, [(1, 2, 10, 22, 0, 5)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"indexes": 1}, ValueError, "no argument of sparse-prefill 'indexes'; the nearest is 'in"),
        ({"sm_scale": None}, ValueError, "sm_scale is missing"),
        ({"q": [1.0]}, TypeError, r"q is a builtins\.list; accepted"),
        ({"indices": torch.zeros(3, 64, dtype=torch.int64)}, ValueError, "indices"),
    ],
)
def test_inputs_that_no_implementation_may_be_given_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    own = tensors()
    with pytest.raises(error, match=message):
        compare.judge("sparse-prefill", own | change, right(own), device="cpu")


def test_a_suite_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no suite 'sparse_prefill'; the nearest is 'sparse-prefi"):
        compare.judge("sparse_prefill", {}, None)
    with pytest.raises(ValueError, match="no suite 'plan'"):
        compare.check("jax-planner", suite="plan")


def test_check_takes_a_callable_and_runs_it_here() -> None:
    calls = []

    def mine(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
        calls.append(q.shape)
        return torch_ref.sparse_prefill(
            q, kv, indices, sm_scale, attn_sink=attn_sink, topk_length=topk_length
        )

    report = compare.check(mine, reference="oracle", cases=[CASE], device="cpu")
    assert [row.verdict.status for row in report.rows] == [Status.PASS]
    assert calls == [(2, 4, 512)] and report.exit_status == 0


def test_check_takes_a_name_and_a_suite() -> None:
    report = compare.check("jax-planner", "prefill-plan", "vllm-0.33.0", cases=[PLAN])
    assert [(row.candidate, row.reference) for row in report.rows] == [
        ("jax-planner", "vllm-0.33.0")
    ]
    assert report.rows[0].verdict.status is Status.PASS
