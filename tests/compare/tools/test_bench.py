"""The bench as a command, on shapes that a CPU runs in a moment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

from compare.bench import measure as bench_measure
from compare.bench import prefill as bench
from compare.bench import sides as sides
from compare.bench.measurement import MeasuredRow, Measurement
from compare.bench.timing import Contender, Method, Timing

SHAPE = "6,64,4,512,48"
CASE = "sparse-prefill:s_q=6,s_kv=64,h=4,topk=48"

CANDIDATES = """
import jax.numpy as jnp
import jax_impl

def right(q, kv, indices, sm_scale):
    return tuple(jax_impl.sparse_prefill(q, kv, indices, sm_scale, backend="xla"))

def last_slot_left_out(q, kv, indices, sm_scale):
    return right(q, kv, indices.at[:, -1].set(-1), sm_scale)

def raises(q, kv, indices, sm_scale):
    raise RuntimeError("no such instruction")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "candidates.py"
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


def run(tmp_path: Path, *words: str) -> tuple[int, dict]:
    out = tmp_path / "speed.json"
    common = ["--reference", "torch", "--rounds", "3", "--launches", "8", "--device", "cpu"]
    status = bench.main(["--out", str(out), *common, *words])
    return status, json.loads(out.read_text())


def test_a_right_contender_is_measured_beside_the_reference(tmp_path, capsys):
    status, found = run(tmp_path, "--shapes", SHAPE, "--candidate", "xla")
    assert status == 0
    assert found["schema"] == 1
    assert found["environment"]["torch"]
    assert found["method"]["launches"] == 8
    (row,) = found["rows"]
    assert (row["case"], row["name"], row["reference"]) == (CASE, "xla", "torch")
    assert (row["reference_us"], row["ours_us"]) == (100.0, 101.0)
    assert row["ratio"] == pytest.approx(100 / 101)
    assert row["ours_rounds_us"] == [101.0, 101.0, 101.0]
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3
    assert row["lse_oracle"] < 1e-5
    captured = capsys.readouterr()
    assert "ratio" in captured.out
    assert f"xla for {CASE} compiled" in captured.err


def test_functions_of_a_file_are_timed_in_the_same_run(tmp_path, file):
    status, found = run(
        tmp_path, "--shapes", SHAPE, "--candidate", "xla", "--also", f"{file}:right"
    )
    assert status == 0
    assert [row["name"] for row in found["rows"]] == ["xla", "candidates.py:right"]
    assert [row["ours_us"] for row in found["rows"]] == [101.0, 102.0]


def test_a_wrong_contender_gets_no_time(tmp_path, file):
    also = ["--also", f"{file}:last_slot_left_out"]
    status, found = run(tmp_path, "--shapes", SHAPE, "--candidate", "xla", *also)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla"]
    (wrong,) = found["not_measured"]
    assert wrong["name"] == "candidates.py:last_slot_left_out"
    assert wrong["reason"].startswith("wrong: rel L2")


def test_a_contender_that_does_not_compile_leaves_the_others(tmp_path, file):
    also = ["--also", f"{file}:raises"]
    status, found = run(tmp_path, "--shapes", SHAPE, "--candidate", "xla", *also)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla"]
    assert found["not_measured"][0]["reason"] == "RuntimeError: no such instruction"


def test_a_contender_without_a_measurable_time_is_said_so(tmp_path, monkeypatch):
    def interleaved(contenders, method):
        return {c.name: Timing((5.0 if c.name == "torch" else -1.0,) * 3) for c in contenders}

    monkeypatch.setattr(bench_measure, "interleaved", interleaved)
    status, found = run(tmp_path, "--shapes", SHAPE, "--candidate", "xla")
    assert status == 1
    assert found["rows"] == []
    assert found["not_measured"][0]["reason"] == "too short to be told from the clock's noise"


def test_the_file_is_written_after_each_shape(tmp_path, monkeypatch):
    made = sides.make_data

    def interrupt_at_the_second(shape, seed, device):
        if shape.d == 576:
            raise KeyboardInterrupt
        return made(shape, seed, device)

    monkeypatch.setattr(sides, "make_data", interrupt_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--shapes", SHAPE, "6,64,4,576,48", "--candidate", "xla")
    found = json.loads((tmp_path / "speed.json").read_text())
    assert [row["case"] for row in found["rows"]] == [CASE]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shapes", "1,2,3"], "'1,2,3' isn't a shape; accepted are s_q,s_kv,h,d,topk or six"),
        (["--shapes", "1,64,4,500,16"], "'1,64,4,500,16' isn't a shape"),
        (["--also", "gone.py:f"], "there is no file 'gone.py'"),
        (["--config", "fast:num_ctaz=2"], "'num_ctaz=2' isn't accepted; keys: num_ctas"),
        (["--config", "num_ctas=2"], "write NAME:key=value"),
        (["--config", "a:num_ctas=0"], "num_ctas must be at least 1"),
        (["--launches", "0"], "launches is 0"),
        (["--candidate", "torch"], "two contenders are called 'torch'"),
        (["--config", "pallas:num_ctas=2"], "two contenders are called 'pallas'"),
    ],
)
def test_words_that_are_off_end_with_status_2(tmp_path, capsys, words, sentence):
    status = bench.main(["--out", str(tmp_path / "x.json"), "--reference", "torch", *words])
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_a_function_that_is_not_there_is_named(tmp_path, file, capsys):
    words = ["--out", str(tmp_path / "x.json"), "--also", f"{file}:gone"]
    assert bench.main(words) == 2
    assert "has no function 'gone'" in capsys.readouterr().err


def test_a_reference_that_does_not_run_here_ends_with_status_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_reference_reason", lambda _: "torch sees no GPU")
    assert bench.main(["--out", str(tmp_path / "x.json"), "--shapes", SHAPE]) == 3
    assert "flash_mla doesn't run here: torch sees no GPU" in capsys.readouterr().err


def test_six_are_the_shapes_of_the_sparse_prefill_table():
    flops = [shape.case.flop / 1e12 for shape in sides.SIX]
    assert flops == pytest.approx([2.3364, 2.3364, 1.1682, 0.6872, 0.3436, 0.5841], abs=1e-4)


def test_a_config_reads_each_kind_of_value():
    name, config = sides.parse_config(
        "mine:num_ctas=66,row_prefetch=0,gather_prefetch=128B,growth_limit=4"
    )
    assert name == "mine"
    assert (config.num_ctas, config.row_prefetch) == (66, False)
    assert (config.gather_prefetch, config.growth_limit) == ("128B", 4.0)


def test_the_ratio_is_reference_time_over_ours():
    names = [field.name for field in dataclasses.fields(MeasuredRow)]
    values = dict.fromkeys(names, 1.0) | {"case": CASE, "name": "a", "reference": "b"}
    row = MeasuredRow(**values | {"ours_us": 50.0, "reference_us": 60.0})  # type: ignore[arg-type]
    assert row.ratio == pytest.approx(1.2)
    measured = Measurement(date="d", revision="r", environment={}, method={}, rows=(row,))
    assert measured.as_json()["rows"][0]["ratio"] == pytest.approx(1.2)
    assert "1.200" in measured.table()


def test_another_configuration_of_the_kernel_is_one_that_a_gpu_can_be_given() -> None:
    _, config = sides.parse_config("few:num_ctas=8,row_prefetch=false")
    function, shape = sides.configured(config), sides.Shape(16, 256, 64, 512, 128)
    bound = jax.jit(lambda q, kv, indices: function(q, kv, indices, shape.sm_scale))
    text = bound.trace(*shape.specs).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
