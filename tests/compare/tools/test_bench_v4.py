"""The bench of the V4 path as a command, on batches that a CPU runs in a moment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ref
from compare.bench import measure as bench_measure
from compare.bench import v4 as bench_v4
from compare.bench import v4_memory as bench_v4_memory
from compare.bench import v4_sides as sides
from compare.bench.measure import Output, Ready
from compare.bench.measurement import Measurement, MemoryRow, TransferRow
from compare.bench.timing import Contender, Method, Timing
from compare.bench.v4_shape import FIVE, Shape
from torch_ref.kv_cache import PagedKV, read_kv

SHAPE, CASE = "2,6,40,4,4,3", "v4-prefill:n=2,q=6,seq=40,h=4,ratio=4,topk=3"
TINY = Shape.parse(SHAPE)
WINDOW_ALONE = Shape.parse("2,5,30,3,1,0")


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
    monkeypatch.setattr(bench_v4, "interleaved", interleaved)


def run(tmp_path: Path, *words: str, memory: bool = False) -> tuple[int, dict]:
    out = tmp_path / "v4.json"
    common = ["--backend", "xla", "--reference", "torch", "--device", "cpu", "--rounds", "3"]
    common += [] if memory else ["--no-memory"]
    status = bench_v4.main(["--out", str(out), *common, *words])
    return status, json.loads(out.read_text())


def test_all_forms_are_measured_beside_attention_alone(tmp_path, capsys):
    status, found = run(tmp_path, "--shapes", SHAPE, "2,5,30,3,1,0")
    assert status == 0
    assert [(row["case"], row["name"]) for row in found["rows"]] == [
        (case, name)
        for case in (CASE, WINDOW_ALONE.case)
        for name in ("xla", "xla-fused", "xla-attention")
    ]
    row = found["rows"][0]
    assert row["reference"] == "torch-attention"
    assert row["ratio"] == pytest.approx(100 / 101)
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3 and row["lse_oracle"] < 1e-5
    transfer = found["transfers"][0]
    assert (transfer["case"], transfer["name"], transfer["us"]) == (CASE, "xla-gather", 100.0)
    # Two requests, each of 10 entries and of all 40 positions.
    assert (transfer["bytes_read"], transfer["bytes_written"]) == (100 * 584, 100 * 1024)
    assert transfer["gb_per_s"] == pytest.approx(100 * 1608 / 100e-6 / 1e9)
    assert "memory" not in found
    assert "planned on the host" in found["method"]["planning"]
    captured = capsys.readouterr()
    assert "GB/s" in captured.out and f"xla-fused for {CASE} compiled" in captured.err


def test_memory_is_asked_of_processes_of_their_own(tmp_path, capsys):
    status, found = run(tmp_path, "--shapes", SHAPE, memory=True)
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
    monkeypatch.setattr(bench_v4_memory, "ask", lambda *_, **__: 1 / 0)
    status, found = run(tmp_path, "--shapes", SHAPE, memory=True)
    assert status == 1
    assert [no["name"] for no in found["not_measured"]] == ["xla (memory)", "xla-fused (memory)"]
    assert len(found["rows"]) == 3


def test_what_a_failed_process_said_last_is_told():
    shape = dataclasses.replace(TINY, context=3)
    with pytest.raises(RuntimeError, match=r"ended with 2: .*--shape: .*'2,6,3,4,4,3'"):
        bench_v4_memory.ask(shape, "xla", fused=False, seed=0, device="cpu")


def test_a_fused_form_with_other_bits_gets_no_time(tmp_path, monkeypatch):
    compiled = sides.COMPILERS[sides.FUSED]

    def one_bit_off(shape: Shape, backend: str):
        program = compiled(shape, backend)

        def call(arrays):
            out, maxima, lse = program(arrays)
            return out, maxima, lse.at[0, 0].multiply(1 + 2**-22)

        return call

    monkeypatch.setitem(sides.COMPILERS, sides.FUSED, one_bit_off)
    status, found = run(tmp_path, "--shapes", SHAPE)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla", "xla-attention"]
    (wrong,) = found["not_measured"]
    assert wrong["name"] == "xla-fused"
    assert wrong["reason"] == "ValueError: 1 values of lse have other bits than xla's"


def test_a_wrong_path_gets_no_time(tmp_path, monkeypatch):
    def narrow(shape: Shape, backend: str):
        program = sides.compile_path(shape, backend, fused=False)
        return lambda arrays: program(
            arrays | {"topk_indices": arrays["topk_indices"].at[:, 0].set(0)}
        )

    monkeypatch.setitem(sides.COMPILERS, sides.WHOLE, narrow)
    status, found = run(tmp_path, "--shapes", SHAPE)
    assert status == 1
    reasons = {no["name"]: no["reason"] for no in found["not_measured"]}
    assert reasons["xla"].startswith("wrong: rel L2")


def test_a_gather_with_a_wrong_row_gets_no_time(tmp_path, monkeypatch):
    def last_row_left_out(shape: Shape, backend: str):
        program = sides.compile_gather(shape, backend)
        return lambda arrays: program(arrays).at[0, -1].set(0)

    monkeypatch.setitem(sides.COMPILERS, sides.GATHER, last_row_left_out)
    status, found = run(tmp_path, "--shapes", SHAPE)
    assert status == 1
    assert "transfers" not in found
    assert found["not_measured"][0]["reason"] == "ValueError: wrong: 1 of 100 rows have other bits"


@pytest.mark.parametrize("shape", FIVE)
def test_the_default_batches_are_one_chunk(shape):
    (chunk,) = shape.plan
    assert (chunk.end, chunk.compressed_rows) == (shape.requests, shape.entries)
    assert chunk.workspace_rows == shape.entries + shape.window_rows
    assert Shape.parse(",".join(map(str, dataclasses.astuple(shape)))) == shape


def test_flop_counts_what_each_token_sees():
    # Positions 34 to 39 see 3 entries each and all positions before them.
    assert TINY.flop == 2 * sum(3 + p + 1 for p in range(34, 40)) * 4 * 2 * 1024
    whole = FIVE[0]
    assert whole.flop == 4096 * 64 * 640 * 2 * 1024


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_data_hold_no_nan_and_lists_name_what_is_seen(ratio):
    shape = Shape(2, 20, 300, 2, ratio, 5)
    data = sides.make_data(shape, 0, "cpu")
    arrays = data.arrays
    for cache, page in (("swa_cache", 64), ("compressed_cache", 256 // ratio)):
        paged = PagedKV(arrays[cache], page, "v4-fp8")
        rows = read_kv(paged, torch.arange(paged.num_slots))
        assert rows.isfinite().all()
        assert 5 < rows[:, :448].float().std() < 50
    seen = (np.tile(shape.positions, 2) + 1) // ratio
    for row, limit in zip(arrays["topk_indices"].tolist(), seen.tolist(), strict=True):
        listed = row[: min(limit, 5)]
        assert all(0 <= entry < limit for entry in listed)
        assert row[len(listed) :] == [-1] * (5 - len(listed))


def test_attention_alone_is_given_what_the_whole_batch_means():
    """Workspace and lists against the plain reading of the caches, token by token."""
    data = sides.make_data(TINY, 0, "cpu")
    given, call = sides.gathered(data), torch_ref.flat_v4_call(**data.reference_arguments)
    assert given.workspace.shape == TINY.workspace_shape
    assert given.indices.shape == (TINY.num_tokens, TINY.list_columns)
    for t, length in enumerate(call.topk_length.tolist()):
        assert int(given.lengths[t]) == length
        mine, theirs = given.kv[given.indices[t, :length]], call.kv[call.indices[t, :length]]
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


def test_the_first_result_is_the_one_whose_bits_the_others_need():
    same = sides.SameBits()
    out, lse = torch.ones(2, 1, 512, dtype=torch.bfloat16), torch.zeros(2, 1)

    def ready(value: Output) -> Ready:
        return same.checked("b", Ready(lambda: value, lambda n: None))

    ready(Output(out, lse)).once()
    ready(Output(out.clone(), lse.clone())).once()
    with pytest.raises(ValueError, match="2 values of lse"):
        ready(Output(out, -lse)).once()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shapes", "1,2,3"], "'1,2,3' isn't a shape; accepted are requests,tokens,context"),
        (["--shapes", "1,9,8,4,4,1"], "accepted are at most context tokens"),
        (["--shapes", "1,1,8,129,4,1"], "h 1 to 128"),
        (["--shapes", "1,1,8,4,1,5"], "ratio 1 with topk 0"),
        (["--shapes", "1,1,8,4,3,5"], "ratio 1 with topk 0, and 2, 4 and 128"),
        (["--shapes", "1,1,8,4,128,5"], "contexts of a whole entry"),
        (["--launches", "0"], "launches is 0"),
        (["--children", "0"], "--children 0; accepted are 1 and more"),
    ],
)
def test_words_that_are_off_end_with_status_2(tmp_path, capsys, words, sentence):
    status = bench_v4.main(["--out", str(tmp_path / "x.json"), "--reference", "torch", *words])
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_a_reference_that_does_not_run_here_ends_with_status_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_v4, "_reference_reason", lambda _: "torch sees no GPU")
    assert bench_v4.main(["--out", str(tmp_path / "x.json"), "--shapes", SHAPE]) == 3
    assert "flash_mla doesn't run here: torch sees no GPU" in capsys.readouterr().err


def test_files_have_the_lists_that_were_measured():
    common: dict[str, Any] = {"date": "d", "revision": "r", "environment": {}, "method": {}}
    bare = Measurement(**common).as_json()
    assert "memory" not in bare and "transfers" not in bare
    memory = MemoryRow(
        case="c", name="a", planned_workspace_bytes=2**20, list_bytes=2, result_bytes=3,
        xla_argument_bytes=4, xla_output_bytes=5, xla_temp_bytes=6, measured_peak_bytes=2**22,
    )  # fmt: skip
    transfer = TransferRow(
        case="c", name="g", us=2.0, bytes_read=3000, bytes_written=5000, rounds_us=(2.0,)
    )
    measured = Measurement(**common, memory=(memory,), transfers=(transfer,))
    found = measured.as_json()
    assert found["memory"][0]["planned_bytes"] == 2**20 + 5
    assert found["transfers"][0]["gb_per_s"] == pytest.approx(4.0)
    assert "4.00" in measured.table()
