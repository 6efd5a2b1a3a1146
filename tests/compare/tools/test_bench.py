"""The bench as a command, on cases that a CPU runs in a moment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from compare.bench import bench as program
from compare.bench import measure as bench_measure
from compare.bench import memory
from compare.bench.config import config_words
from compare.bench.measure import Oracle, Output, SameBits, measure
from compare.bench.measurement import MeasuredRow, Measurement, MemoryRow, TransferRow
from compare.bench.timing import Contender, Method, Timing
from compare.cli import main
from compare.judging.attention_call import SparsePrefillResult
from compare.protocol.suite import lookup
from compare.protocol.timing import Launch
from compare.suites.table import SUITES, make_inputs, parse_case

PREFILL = "sparse-prefill:s_q=6,s_kv=64,h=4,topk=48"
DECODE = "dcp-decode:lens=100+40,q=2+3,h=4,world=2"
V4 = "v4-prefill:seq=40+40,q=6+6,topk=3,h=4,max_len=40,max_tokens=12"
V4_ALONE = "v4-prefill:seq=30+30,q=5+5,ratio=1,h=3,max_len=30,max_tokens=10"

CANDIDATES = """
import compare
import torch_ref

def right(q, kv, indices, sm_scale, **given):
    return torch_ref.sparse_prefill(q, kv, indices, sm_scale, **given)

def last_slot_left_out(q, kv, indices, sm_scale, **given):
    indices = indices.clone()
    indices[:, -1] = -1
    return right(q, kv, indices, sm_scale, **given)

def raises(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    raise RuntimeError("no such instruction")

@compare.candidate(framework="jax", name="in-jax")
def in_jax(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    import jax_impl
    return tuple(jax_impl.sparse_prefill(q, kv, indices, sm_scale, backend="xla"))

def decode(q, kv_cache, block_table, seq_lens, query_start_loc, sm_scale, **given):
    return torch_ref.dcp_decode(
        q, kv_cache, block_table, seq_lens.cpu(), query_start_loc.cpu(), sm_scale, **given
    )

def lengths_of_the_whole_group(q, kv_cache, seq_lens, block_table, **given):
    return decode(q, kv_cache, block_table, seq_lens - 1, **given)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "timed.py"
    path.write_text(CANDIDATES)
    return path


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as on a machine that does nothing else; every contender is launched all the same."""

    def interleaved(contenders: Sequence[Contender], method: Method) -> dict[str, Timing]:
        for contender in contenders:
            contender.launch(2)
        return {
            contender.name: Timing((100.0 + number,) * method.rounds)
            for number, contender in enumerate(contenders)
        }

    monkeypatch.setattr(bench_measure, "interleaved", interleaved)
    monkeypatch.setattr(program, "interleaved", interleaved)


def run(tmp_path: Path, *words: str, memory: bool = False) -> tuple[int, dict]:
    out = tmp_path / "speed.json"
    common = ["--rounds", "3", "--launches", "8", "--device", "cpu", "--out", str(out)]
    common += [] if memory else ["--no-memory"]
    status = main(["bench", *words, *common])
    return status, json.loads(out.read_text())


def against_torch(tmp_path: Path, *words: str, memory: bool = False) -> tuple[int, dict]:
    return run(tmp_path, *words, "--against", "torch", "--candidate", "xla", memory=memory)


def test_a_right_contender_is_measured_beside_the_reference(tmp_path, capsys):
    status, found = against_torch(tmp_path, PREFILL)
    assert status == 0
    assert found["schema"] == 1
    assert found["environment"]["torch"]
    assert found["method"]["launches"] == 8
    (row,) = found["rows"]
    assert (row["case"], row["name"], row["reference"]) == (PREFILL, "xla", "torch")
    assert (row["reference_us"], row["ours_us"]) == (100.0, 101.0)
    assert row["ratio"] == pytest.approx(100 / 101)
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3 and row["lse_oracle"] < 1e-5
    captured = capsys.readouterr()
    assert "xla" in captured.out and f"{PREFILL}: xla rel L2" in captured.err


def test_functions_of_a_file_are_timed_in_the_same_run(tmp_path, file):
    names = [f"{file}:right", f"{file}:in_jax"]
    words = [word for name in names for word in ("--against", name)]
    status, found = run(tmp_path, PREFILL, "--against", "torch", *words, "--candidate", "xla")
    assert status == 0
    beside = {(row["name"], row["reference"]) for row in found["rows"]}
    assert beside >= {("xla", "torch"), ("xla", names[0]), (names[0], "torch")}


def test_a_wrong_contender_gets_no_time(tmp_path, file):
    name = f"{file}:last_slot_left_out"
    words = ("--against", "torch", "--against", name, "--candidate", "xla")
    status, found = run(tmp_path, PREFILL, *words)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla"]
    (wrong,) = found["not_measured"]
    assert wrong["name"] == name and wrong["reason"].startswith("wrong: rel L2")


def test_a_contender_that_does_not_compile_leaves_the_others(tmp_path, file):
    words = ("--against", "torch", "--against", f"{file}:raises", "--candidate", "xla")
    status, found = run(tmp_path, PREFILL, *words)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla"]
    assert found["not_measured"][0]["reason"] == "RuntimeError: no such instruction"


def test_a_contender_without_a_measurable_time_is_said_so(tmp_path, monkeypatch):
    def interleaved(contenders, method):
        return {c.name: Timing((5.0 if c.name == "torch" else -1.0,) * 3) for c in contenders}

    monkeypatch.setattr(bench_measure, "interleaved", interleaved)
    status, found = against_torch(tmp_path, PREFILL)
    assert status == 1
    assert found["rows"] == []
    assert found["not_measured"][0]["reason"] == "too short to be told from the clock's noise"


def test_the_file_is_written_after_each_case(tmp_path, monkeypatch):
    made = program.make_inputs

    def interrupt_at_the_second(case):
        if case.d == 576:
            raise KeyboardInterrupt
        return made(case)

    monkeypatch.setattr(program, "make_inputs", interrupt_at_the_second)
    out = tmp_path / "speed.json"
    words = [PREFILL, f"{PREFILL},d=576", "--against", "torch", "--candidate", "xla"]
    assert main(["bench", *words, "--device", "cpu", "--out", str(out)]) == 130
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == [PREFILL]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sparse-prefill:s_q=1,s_kw=3"], "sparse-prefill has no key 's_kw'"),
        (["prefill-plan"], "prefill-plan isn't timed"),
        ([PREFILL, "--against", "gone.py:f"], "there is no file gone.py"),
        ([PREFILL, "--config", "fast:num_ctaz=2"], "'num_ctaz=2' isn't accepted; keys: num_ctas"),
        ([PREFILL, "--config", "num_ctas=2"], "write NAME:key=value"),
        ([PREFILL, "--config", "a:num_ctas=0"], "num_ctas must be at least 1"),
        ([V4, "--config", "a:num_ctas=2"], "the kernels of v4-prefill take none"),
        ([PREFILL, "--candidate", "torch"], "two contenders are called 'torch'"),
        ([PREFILL, "--candidate", "pallas", "--config", "pallas:num_ctas=2"], "called 'pallas'"),
        ([PREFILL, "--rounds", "0"], "rounds"),
    ],
)
def test_words_that_are_off_end_with_status_2(tmp_path, capsys, words, sentence):
    common = [] if "--against" in words else ["--against", "torch"]
    assert main(["bench", *words, *common, "--out", str(tmp_path / "x.json")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_function_that_is_not_there_is_named(tmp_path, file, capsys):
    words = [PREFILL, "--against", f"{file}:gone", "--out", str(tmp_path / "x.json")]
    assert main(["bench", *words]) == 2
    assert "has no function 'gone'" in capsys.readouterr().err


def test_a_reference_that_does_not_run_here_ends_with_status_3(tmp_path, capsys):
    words = [PREFILL, "--device", "cpu", "--out", str(tmp_path / "x.json")]
    assert main(["bench", *words]) == 3
    assert "flash_mla doesn't run here: " in capsys.readouterr().err


def test_six_are_the_shapes_of_the_sparse_prefill_table():
    bench = SUITES["sparse-prefill"].bench()
    assert bench is not None
    flops = [parse_case(line).flop / 1e12 for line in bench.lines]  # type: ignore[attr-defined]
    assert flops == pytest.approx([2.3364, 2.3364, 1.1682, 0.6872, 0.3436, 0.5841], abs=1e-4)


def test_a_config_reads_each_kind_of_value():
    bench = SUITES["sparse-prefill"].bench()
    assert bench is not None and bench.config is not None
    text = "mine:num_ctas=66,row_prefetch=0,gather_prefetch=128B,growth_limit=4"
    name, values = config_words(text, lookup(bench.config))
    config = lookup(bench.config)(**values)
    assert name == "mine"
    assert (config.num_ctas, config.row_prefetch) == (66, False)
    assert (config.gather_prefetch, config.growth_limit) == ("128B", 4.0)


def test_the_ratio_is_reference_time_over_ours():
    names = [field.name for field in dataclasses.fields(MeasuredRow)]
    values = dict.fromkeys(names, 1.0) | {"case": PREFILL, "name": "a", "reference": "b"}
    row = MeasuredRow(**values | {"ours_us": 50.0, "reference_us": 60.0})  # type: ignore[arg-type]
    assert row.ratio == pytest.approx(1.2)
    measured = Measurement(date="d", revision="r", environment={}, method={}, rows=(row,))
    assert measured.as_json()["rows"][0]["ratio"] == pytest.approx(1.2)
    assert "1.200" in measured.table()


def test_another_configuration_of_the_kernel_is_one_that_a_gpu_can_be_given() -> None:
    from compare.suites.sparse_prefill import jax_adapter

    config = lookup("jax_impl.prefill.sparse.kernel_sm90.config:Config")(
        num_ctas=8, row_prefetch=False
    )
    inputs = make_inputs(parse_case("sparse-prefill:s_q=16,s_kv=256,h=64,d=512,topk=128"))

    def attend(q, kv, indices):
        return jax_adapter._configured(q, kv, indices, {}, 0.1, config)

    traced = jax.jit(attend).trace(inputs.q, inputs.kv, inputs.indices)  # type: ignore[attr-defined]
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_right_contender_is_measured_and_a_wrong_one_is_not(tmp_path, file):
    right, wrong = f"{file}:decode", f"{file}:lengths_of_the_whole_group"
    words = ("--against", "torch", "--against", right, "--against", wrong, "--candidate", "xla")
    status, found = run(tmp_path, DECODE, *words)
    assert status == 1
    assert {row["name"] for row in found["rows"]} == {"xla", right}
    row = next(r for r in found["rows"] if (r["name"], r["reference"]) == ("xla", "torch"))
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3 and row["lse_oracle"] < 1e-5
    (failed,) = found["not_measured"]
    assert failed["name"] == wrong


def test_each_reference_has_rows_and_those_after_the_first_have_one_themselves():
    result = SparsePrefillResult(
        out=np.ones((2, 1, 512), np.float32), lse=np.zeros((2, 1), np.float32)
    )
    tensors = torch.from_numpy(result.out), torch.from_numpy(result.lse)
    oracle = Oracle(torch.tensor([0, 1]), tensors[0].double(), tensors[1].double())
    ready = dict.fromkeys("abc", lambda: Launch(once=lambda: result, launch=lambda n: None))
    rows, failed = measure("case", 1.0, ready, oracle, ["b", "c"], Method(rounds=1), lambda _: None)
    assert [(row.name, row.reference) for row in rows] == [("a", "b"), ("a", "c"), ("c", "b")]
    assert failed == []


@pytest.mark.parametrize(
    ("words", "redundant"),
    [
        ("lens=100+100,q=2+2,h=4", ()),
        ("lens=100+100,q=1+1,h=4", ("flash_mla-flattened",)),
        ("lens=100+100,q=1+2,h=4", ("flash_mla-flattened",)),
        ("lens=100+100,q=2+2,h=4,world=2", ("flash_mla-flattened",)),
    ],
)
def test_the_flattened_form_is_measured_where_it_is_another_one(words, redundant):
    bench = SUITES["dcp-decode"].bench()
    assert bench is not None
    assert bench.redundant(make_inputs(parse_case(f"dcp-decode:{words}"))) == redundant


def test_the_seven_shapes_are_those_of_the_first_measurements():
    bench = SUITES["dcp-decode"].bench()
    assert bench is not None
    cases = [parse_case(line) for line in bench.lines[:7]]
    shapes = [(len(c.lens), c.q[0], c.h, c.lens[0]) for c in cases]  # type: ignore[attr-defined]
    assert shapes == [
        (128, 1, 128, 4096),
        (128, 1, 16, 8192),
        (32, 1, 64, 16384),
        (32, 8, 16, 16384),
        (32, 8, 64, 8192),
        (128, 2, 128, 4096),
        (1, 8, 128, 65536),
    ]


def test_ragged_shapes_mix_the_whole_range_and_read_back():
    bench = SUITES["dcp-decode"].bench()
    assert bench is not None
    cases = [parse_case(line) for line in bench.lines[7:]]
    assert [(c.world, c.h) for c in cases] == [  # type: ignore[attr-defined]
        (world, h) for world in (2, 4) for h in (16, 64, 128)
    ]
    for case in cases:
        assert set(case.q) == set(range(1, 9))  # type: ignore[attr-defined]
        assert 8192 <= min(case.lens) < max(case.lens) <= 16384  # type: ignore[attr-defined]


def test_all_forms_are_measured_beside_attention_alone(tmp_path, capsys):
    words = ("--candidate", "xla", "--candidate", "xla-fused", "--against", "torch")
    status, found = run(tmp_path, V4, V4_ALONE, *words)
    assert status == 0
    assert [(row["case"], row["name"]) for row in found["rows"]] == [
        (case, name) for case in (V4, V4_ALONE) for name in ("xla", "xla-fused", "xla-attention")
    ]
    row = found["rows"][0]
    assert row["reference"] == "torch"
    assert row["ratio"] == pytest.approx(100 / 101)
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3 and row["lse_oracle"] < 1e-5
    transfer = found["transfers"][0]
    assert (transfer["case"], transfer["name"], transfer["us"]) == (V4, "xla-gather", 100.0)
    # Two requests, each of 10 entries and of all 40 positions.
    assert (transfer["bytes_read"], transfer["bytes_written"]) == (100 * 584, 100 * 1024)
    assert transfer["gb_per_s"] == pytest.approx(100 * 1608 / 100e-6 / 1e9)
    assert "memory" not in found
    assert "planned on the host" in found["method"]["planning"]
    assert "GB/s" in capsys.readouterr().out


def test_memory_is_asked_of_processes_of_their_own(tmp_path, capsys):
    words = ("--candidate", "xla", "--candidate", "xla-fused", "--against", "torch")
    status, found = run(tmp_path, V4, *words, memory=True)
    assert status == 0
    whole, fused = found["memory"]
    assert (whole["name"], fused["name"]) == ("xla", "xla-fused")
    assert whole["planned_workspace_bytes"] == 2 * (10 + 40) * 1024
    assert fused["planned_workspace_bytes"] == 0
    for row in (whole, fused):
        assert row["measured_peak_bytes"] is None  # a CPU doesn't tell
        assert row["xla_output_bytes"] >= row["result_bytes"] == 12 * 4 * (1024 + 8)
        assert row["xla_argument_bytes"] >= 12 * 4 * 1024
    assert "XLA temp + output MiB" in capsys.readouterr().out


def test_a_failed_process_leaves_the_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ask", lambda *_, **__: 1 / 0)
    status, found = against_torch(tmp_path, V4, memory=True)
    assert status == 1
    assert [no["name"] for no in found["not_measured"]] == ["xla (memory)"]
    assert len(found["rows"]) == 2


def test_what_a_failed_process_said_last_is_told():
    with pytest.raises(RuntimeError, match=r"ended with 1: .*seq counts this step's tokens too"):
        memory.ask("v4-prefill:seq=3,q=6", "xla", "cpu")


def test_a_fused_form_with_other_bits_gets_no_time(tmp_path, monkeypatch):
    from compare.suites.v4_prefill import jax_adapter

    made = jax_adapter.as_result
    seen = []

    def one_bit_off(found):
        result = made(found)
        seen.append(result)
        if len(seen) != 2:
            return result
        lse = result.lse.copy()
        lse[0, 0] *= 1 + 2**-22
        return dataclasses.replace(result, lse=lse)

    monkeypatch.setattr(jax_adapter, "as_result", one_bit_off)
    words = ("--candidate", "xla", "--candidate", "xla-fused", "--against", "torch")
    status, found = run(tmp_path, V4, *words)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla", "xla-attention"]
    (wrong,) = found["not_measured"]
    assert wrong["name"] == "xla-fused"
    assert wrong["reason"] == "ValueError: 1 values of lse have other bits than the first one's"


def test_a_gather_with_a_wrong_row_gets_no_time(tmp_path, monkeypatch):
    from compare.suites.v4_prefill import bench

    compiled = bench.compiled_launch

    def last_row_left_out(function, arguments, device, result):
        return compiled(lambda *given: function(*given).at[0, -1].set(0), arguments, device, result)

    ready = bench.BENCH.transfers
    inputs = make_inputs(parse_case(V4))
    assert ready is not None
    monkeypatch.setattr(bench, "compiled_launch", last_row_left_out)
    with pytest.raises(ValueError, match="wrong: 1 of 100 rows have other bits"):
        ready(inputs, "xla", "cpu")["xla-gather"].prepare().once()


def test_the_default_batches_are_one_chunk():
    from compare.suites.v4_prefill.plan import right_plan

    bench = SUITES["v4-prefill"].bench()
    assert bench is not None and bench.planned is not None
    for line in bench.lines:
        small = parse_case(line.replace("65536", "512").replace("1024", "64").replace("4096", "64"))
        (chunk,) = right_plan(make_inputs(small))  # type: ignore[arg-type]
        assert chunk.end == len(small.seq)  # type: ignore[attr-defined]


def test_flop_counts_what_each_token_sees():
    # Positions 34 to 39 see 3 entries each and all positions before them.
    bench = SUITES["v4-prefill"].bench()
    assert bench is not None
    seen = 2 * sum(3 + p + 1 for p in range(34, 40))
    assert bench.flop(make_inputs(parse_case(V4))) == seen * 4 * 2 * 1024


def test_the_first_result_is_the_one_whose_bits_the_others_need():
    same = SameBits()
    out, lse = torch.ones(2, 1, 512, dtype=torch.bfloat16), torch.zeros(2, 1)
    same.check(Output(out, lse))
    same.check(Output(out.clone(), lse.clone()))
    with pytest.raises(ValueError, match="2 values of lse"):
        same.check(Output(out, -lse))


def test_files_have_the_lists_that_were_measured():
    numbers = dict.fromkeys((f.name for f in dataclasses.fields(MemoryRow)), 1)
    row = MemoryRow(**numbers | {"case": "c", "name": "n"})  # type: ignore[arg-type]
    moved = TransferRow(case="c", name="n", us=1, bytes_read=1, bytes_written=1, rounds_us=(1.0,))
    common = {"date": "d", "revision": "r", "environment": {}, "method": {}}
    plain = Measurement(**common).as_json()  # type: ignore[arg-type]
    assert "transfers" not in plain and "memory" not in plain
    full = Measurement(**common, memory=(row,), transfers=(moved,)).as_json()  # type: ignore[arg-type]
    assert full["memory"][0]["planned_bytes"] == 3
    assert full["transfers"][0]["gb_per_s"] == pytest.approx(0.002)
