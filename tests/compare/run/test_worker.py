from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compare.isolation.child import last_words
from compare.isolation.failures import Raised, verdict_of
from compare.isolation.worker import Isolated
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.plans import PlanResult
from compare.protocol.implementation import TimedOut, UnknownImplementation, Unsupported, WorkerDied
from compare.protocol.inputs import Inputs
from compare.suites.table import make_inputs, parse_case
from tests.compare.run.conftest import PLAN_CASE

PLAN = make_inputs(parse_case(PLAN_CASE))
Make = Callable[[str], Isolated]

# Says what to do by the length of the model: one worker, many fates.
FATES = """
    import os, sys, time

    def f(seq_lens, query_lens, max_model_len, **_):
        if max_model_len == 101:
            raise KeyError("no such head")
        if max_model_len == 102:
            raise NotImplementedError("only 64 heads")
        if max_model_len == 103:
            print("assertion failed: tile", file=sys.stderr, flush=True)
            os.abort()
        if max_model_len == 104:
            time.sleep(60)
        if max_model_len == 105:
            os._exit(3)
        if max_model_len == 106:
            sys.exit("goodbye")
        return [(0, 1, 10, 22, 0, os.getpid())]
"""


def fate(number: int) -> Inputs:
    return make_inputs(parse_case(PLAN_CASE.replace("max_len=64", f"max_len={number}")))


def pid(implementation: Isolated) -> int:
    result = implementation.run(PLAN)
    assert isinstance(result, PlanResult)
    return result.chunks[0].query_end


def test_a_worker_stays_survives_exceptions_and_is_replaced_after_a_death(isolated: Make) -> None:
    it = isolated(FATES)
    first = pid(it)
    assert pid(it) == first

    with pytest.raises(Raised, match="KeyError: 'no such head'") as raised:
        it.run(fate(101))
    assert raised.value.failure.frames[-1].endswith('raise KeyError("no such head")')
    assert verdict_of(raised.value).status.name == "ERROR"

    with pytest.raises(Unsupported, match=r"^only 64 heads$") as refused:
        it.run(fate(102))
    assert verdict_of(refused.value).status.name == "UNSUPPORTED"
    assert pid(it) == first

    with pytest.raises(WorkerDied, match=r"signal 6 \(SIGABRT\)") as died:
        it.run(fate(103))
    assert "assertion failed: tile" in str(died.value)
    assert "mine.py" in str(died.value)
    assert verdict_of(died.value).status.name == "CRASH"
    second = pid(it)
    assert second != first

    with pytest.raises(WorkerDied, match="exit status 3 before it answered"):
        it.run(fate(105))
    with pytest.raises(WorkerDied, match=r"(?s)exit status 1 .*goodbye"):
        it.run(fate(106))

    it.timeout = 0.3
    with pytest.raises(TimedOut, match=r"no answer within 0\.3 s") as slow:
        it.run(fate(104))
    assert verdict_of(slow.value).status.name == "TIMEOUT"
    it.timeout = None
    assert pid(it) not in (first, second)


def test_what_a_function_prints_comes_out_here(
    isolated: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    isolated("def f(query_lens, **_):\n    print('hello from f')\n    return []").run(PLAN)
    assert "hello from f" in capfd.readouterr().err


def test_results_come_back_with_dtypes_and_values(isolated: Make, tmp_path: Path) -> None:
    it = isolated("""
        import compare, numpy as np

        @compare.candidate(framework="numpy")
        def f(q, kv, indices, **_):
            return q[..., :512] * 2, np.zeros(7), np.full(q.shape[:2], len(kv), np.float32)
    """)
    inputs = make_inputs(parse_case("sparse-prefill:s_q=3,s_kv=40,h=4,d=576"))
    assert isinstance(inputs, SparsePrefillInputs)
    result, seconds = it.run_timed(inputs)
    assert isinstance(result, SparsePrefillResult)
    assert result.out.dtype == ml_dtypes.bfloat16
    assert (result.out == inputs.q[..., :512] * 2).all()
    assert result.max_logits is not None and result.max_logits.dtype == np.float64
    assert (result.lse == 40).all()
    assert 0 < seconds < 60

    own = dataclasses.replace(inputs, q=inputs.q[::2], indices=inputs.indices[::2], case=None)
    result = it.run(own)
    assert isinstance(result, SparsePrefillResult)
    assert (result.out == inputs.q[::2, :, :512] * 2).all()


def test_inputs_that_are_not_their_case_s_are_refused(isolated: Make) -> None:
    it = isolated("""
        import compare

        @compare.candidate(framework="numpy")
        def f(q, kv, indices, **_): ...
    """)
    inputs = make_inputs(parse_case("sparse-prefill:s_q=3,s_kv=40,h=4"))
    assert isinstance(inputs, SparsePrefillInputs)
    with pytest.raises(Raised, match="carry a case but aren't what its line makes"):
        it.run(dataclasses.replace(inputs, sm_scale=1.0))


def test_the_author_s_name_suites_and_supports_come_from_the_worker(isolated: Make) -> None:
    it = isolated("""
        import compare

        @compare.candidate(name="ours", supports=lambda case: f"not with chunk {case.chunk}")
        def f(seq_lens, query_lens): ...
    """)
    assert it.suites == {"prefill-plan"}
    assert it.name == "ours"
    assert it.supports(parse_case(PLAN_CASE)) == "not with chunk 1"


def test_a_supports_that_raises_does_not_end_the_worker(isolated: Make) -> None:
    it = isolated("""
        import compare

        @compare.candidate(supports=lambda case: case.no_such_key)
        def f(seq_lens, query_lens): ...
    """)
    for _ in range(2):
        with pytest.raises(Raised, match="no_such_key"):
            it.supports(parse_case(PLAN_CASE))


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("1 / 0", "ERROR", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(5)", "CRASH", "exit status 5"),
        ("import no_such_library", "ERROR", "No module named 'no_such_library'"),
    ],
)
def test_a_module_that_cannot_be_imported_fails_each_case(
    isolated: Make, code: str, status: str, message: str
) -> None:
    it = isolated(code)
    it.check()
    assert it.supports(parse_case(PLAN_CASE)) is None
    for _ in range(2):
        with pytest.raises((Raised, WorkerDied), match=message) as raised:
            it.run(PLAN)
        assert verdict_of(raised.value).status.name == status


def test_a_function_that_is_not_there_is_said_at_once(isolated: Make) -> None:
    with pytest.raises(UnknownImplementation, match="has no function 'f'; the nearest is 'ff'"):
        isolated("def ff(): ...").check()


def test_last_words_are_the_newest_frames_or_the_last_lines() -> None:
    log = "\n".join([
        *(f"line {i}" for i in range(20)), "", "Fatal Python error: Aborted", "",
        "Stack (most recent call first):", *(f'  File "{i}.py", line 1 in f' for i in range(9)),
        "Extension modules: numpy (total: 1)",
    ])  # fmt: skip
    words = last_words(log)
    assert words[0] == "line 16" and words[4] == "Fatal Python error: Aborted"
    assert words[5:] == [f'  File "{i}.py", line 1 in f' for i in range(3)]
    assert last_words("\n".join(map(str, range(20)))) == [str(i) for i in range(12, 20)]
