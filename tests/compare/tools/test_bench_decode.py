"""The bench of decode as a command, on batches that a CPU runs in a moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from compare.bench import decode as bench_decode
from compare.bench import decode_sides as sides
from compare.bench import measure as bench_measure
from compare.bench.measure import Oracle, Output, Ready, measure
from compare.bench.timing import Contender, Method, Timing

SHAPE = "3,1-3,4,100-200,2"
CASE = "decode:b=3,q=1-3,h=4,l=100-200,world=2"

CANDIDATES = """
import numpy as np
from compare.bench import decode_sides as sides

def right(shape):
    return sides.backend("xla")(shape)

def lengths_of_the_whole_group(shape):
    import dataclasses
    plan, decode = sides.backend("xla")(shape)
    return dataclasses.replace(plan, row_keys=np.maximum(plan.row_keys - 40, 1)), decode

def raises(shape):
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
    status = bench_decode.main(["--out", str(out), *common, *words])
    return status, json.loads(out.read_text())


def test_a_right_contender_is_measured_and_a_wrong_one_is_not(tmp_path, file, capsys):
    also = [f"--also={file}:{name}" for name in ("right", "lengths_of_the_whole_group", "raises")]
    status, found = run(tmp_path, "--shapes", SHAPE, "--candidate", "xla", *also)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["xla", "candidates.py:right"]
    row = found["rows"][0]
    assert (row["case"], row["reference"]) == (CASE, "torch")
    assert row["ratio"] == pytest.approx(100 / 101)
    assert 1e-4 < row["rel_l2_oracle"] < 4e-3 and row["lse_oracle"] < 1e-5
    reasons = {no["name"]: no["reason"] for no in found["not_measured"]}
    assert reasons["candidates.py:lengths_of_the_whole_group"].startswith("wrong: rel L2")
    assert reasons["candidates.py:raises"] == "RuntimeError: no such instruction"
    assert f"xla for {CASE} compiled" in capsys.readouterr().err


def test_each_reference_has_rows_and_those_after_the_first_have_one_themselves():
    data = Output(torch.ones(2, 1, 512), torch.zeros(2, 1))
    oracle = Oracle(torch.tensor([0, 1]), data.out.double(), data.lse.double())
    ready = dict.fromkeys("abc", lambda: Ready(lambda: data, lambda n: None))
    rows, failed = measure("case", 1.0, ready, oracle, ["b", "c"], Method(rounds=1), lambda _: None)
    assert [(row.name, row.reference) for row in rows] == [("a", "b"), ("a", "c"), ("c", "b")]
    assert failed == []


@pytest.mark.parametrize(
    ("shape", "names", "references"),
    [
        ("4,2,4,100", ["flash_mla", "pallas", "flash_mla-flattened"], 2),
        ("4,1,4,100", ["flash_mla", "pallas"], 1),
        ("4,1-2,4,100", ["flash_mla", "pallas"], 1),
        ("4,2,4,100,2", ["flash_mla", "pallas"], 1),
    ],
)
def test_the_flattened_form_is_measured_where_it_is_another_one(shape, names, references):
    makers = {"flash_mla": None, "pallas": sides.backend("pallas")}
    found, against = bench_decode._of_shape(makers, "flash_mla", sides.Shape.parse(shape))
    assert list(found) == names
    assert against == ["flash_mla", "flash_mla-flattened"][:references]


def test_the_seven_shapes_are_those_of_the_first_measurements():
    assert [shape.case for shape in sides.SEVEN[:4]] == [
        "decode:b=128,q=1,h=128,l=4096",
        "decode:b=128,q=1,h=16,l=8192",
        "decode:b=32,q=1,h=64,l=16384",
        "decode:b=32,q=8,h=16,l=16384",
    ]
    # 284 us at 513 TFLOPS.
    assert sides.SEVEN[0].flop / 284e-6 / 1e12 == pytest.approx(513, rel=0.01)


def test_ragged_shapes_mix_the_whole_range_and_read_back():
    assert len(sides.RAGGED) == 6
    for shape in sides.RAGGED:
        assert {min(shape.query_lens), max(shape.query_lens)} == {1, 8}
        assert {min(shape.total_lens), max(shape.total_lens)} == {8192, 16384}
        assert shape.flattened
        words = shape.case.removeprefix("decode:").split(",")
        assert sides.Shape.parse(",".join(word.split("=")[1] for word in words)) == shape


def test_the_data_of_a_shape_lie_on_pages_of_their_own():
    shape = sides.Shape.parse(SHAPE)
    data = sides.make_data(shape, 0, "cpu")
    assert data.q.shape == (shape.query_start_loc[-1], 4, 576)
    pages = [-(-keys // 64) for keys in shape.seq_lens]
    named = np.concatenate([row[:n] for row, n in zip(data.block_table, pages, strict=True)])
    assert sorted(named.tolist()) == list(range(len(data.kv_cache)))
    assert data.checked.key_counts[-1] == shape.seq_lens[-1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shapes", "1,2,3"], "'1,2,3' isn't a shape; accepted are seven, ragged or b,q,h,l"),
        (["--shapes", "1,5,4,3"], "'1,5,4,3' isn't a shape"),
        (["--shapes", "1,1,129,64"], "h 1 to 128"),
        (["--also", "gone.py:f"], "there is no file 'gone.py'"),
        (["--config", "fast:growth_limitt=2"], "'growth_limitt=2' isn't accepted; keys: "),
        (["--config", "a:growth_limit=200"], "growth_limit must lie in [0, 64]"),
        (["--launches", "0"], "launches is 0"),
        (["--candidate", "torch"], "two contenders are called 'torch'"),
    ],
)
def test_words_that_are_off_end_with_status_2(tmp_path, capsys, words, sentence):
    status = bench_decode.main(["--out", str(tmp_path / "x.json"), "--reference", "torch", *words])
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_a_reference_that_does_not_run_here_ends_with_status_3(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_decode, "_reference_reason", lambda _: "torch sees no GPU")
    assert bench_decode.main(["--out", str(tmp_path / "x.json"), "--shapes", SHAPE]) == 3
    assert "flash_mla doesn't run here: torch sees no GPU" in capsys.readouterr().err
