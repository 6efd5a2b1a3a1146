"""The command `compare` on files of decode: exit status, and what it says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from compare.bundle.bundle import save_bundle
from compare.protocol.arrays import to_torch
from compare.run import registry
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.table import make_inputs, parse_case
from tests.compare.cli.command_line import command_line

CASE = "dcp-decode:lens=61+43,q=5+2,h=2,world=2,rank=1,kv=e4m3"
TENSORS = ("q", "kv_cache", "block_table", "seq_lens", "query_start_loc", "total_lens")


@pytest.fixture(scope="module")
def call() -> tuple[DcpDecodeInputs, DcpDecodeResult]:
    inputs = make_inputs(parse_case(CASE))
    assert isinstance(inputs, DcpDecodeInputs)
    result = registry.in_process("torch", "cpu").run(inputs)
    assert isinstance(result, DcpDecodeResult)
    return inputs, result


def by_hand(path: Path, inputs: DcpDecodeInputs, result: DcpDecodeResult, *left_out: str) -> Path:
    """A file as the guide writes it."""
    held = {name: to_torch(getattr(inputs, name)) for name in TENSORS}
    held |= {"out": to_torch(result.out), "lse": to_torch(result.lse)}
    words = ("sm_scale", "dcp_rank", "dcp_world", "kv_scale")
    metadata = {"suite": "dcp-decode"} | {name: str(getattr(inputs, name)) for name in words}
    save_file(
        {name: tensor for name, tensor in held.items() if name not in left_out},
        path,
        metadata={name: text for name, text in metadata.items() if name not in left_out},
    )
    return path


def test_a_file_written_by_hand_passes(tmp_path, call):
    mine = by_hand(tmp_path / "mine.safetensors", *call)
    found = command_line("compare", str(mine), "--report", "json", "--out", str(tmp_path))
    assert (found.status, found.err) == (0, "")
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["candidate"] == str(mine)
    assert row["case"] == f"dcp-decode of {mine}"
    assert "note:" not in found.out


def test_a_key_too_many_is_named(tmp_path, call):
    inputs, _ = call
    bounds = inputs.total_lens + 1
    wrong = registry.in_process("torch", "cpu").run(
        dataclasses.replace(inputs, total_lens=np.minimum(bounds, [62, 44]).astype(np.int32))
    )
    assert isinstance(wrong, DcpDecodeResult)
    mine, theirs = tmp_path / "mine.safetensors", tmp_path / "theirs.safetensors"
    by_hand(mine, inputs, wrong)
    save_bundle(theirs, CASE, call[1])
    found = command_line("compare", str(mine), str(theirs))
    assert found.status == 1
    assert "diagnosis bound-off-by-one" in found.out
    # The other way round the reference is what fails.
    found = command_line("compare", str(theirs), str(mine))
    assert found.status == 3
    assert "The reference failed in 1 case" in found.out


def test_base_2_is_named_unless_it_is_declared(tmp_path, call):
    inputs, result = call
    base2 = dataclasses.replace(result, lse=(result.lse / np.log(2)).astype(np.float32))
    mine = tmp_path / "mine.safetensors"
    save_bundle(mine, inputs, base2)
    found = command_line("compare", str(mine))
    assert found.status == 1
    assert "diagnosis lse-base-2" in found.out
    save_bundle(mine, inputs, base2, lse="base2")
    found = command_line("compare", str(mine))
    assert found.status == 0
    assert "note: lse is declared base 2 and was multiplied by ln 2" in found.out.splitlines()


@pytest.mark.parametrize(
    ("left_out", "sentence"),
    [
        ("seq_lens", "lacks the input seq_lens: give q, kv_cache"),
        ("sm_scale", "sm_scale is '' in the metadata; accepted is a finite number"),
        ("suite", "give suite=dcp-decode in the metadata"),
        ("out", "lacks the result out; out and lse are needed"),
    ],
)
def test_what_is_missing_is_a_sentence(tmp_path, call, left_out, sentence):
    mine = by_hand(tmp_path / "mine.safetensors", *call, left_out)
    found = command_line("compare", str(mine))
    assert (found.status, found.out) == (2, "")
    assert f"{mine}" in found.err
    assert sentence in found.err


def test_a_result_of_another_dtype_fails(tmp_path, call):
    inputs, result = call
    mine = tmp_path / "mine.safetensors"
    save_bundle(mine, inputs, dataclasses.replace(result, out=result.out.astype(np.float16)))
    found = command_line("compare", str(mine))
    assert found.status == 1
    assert "out is float16; bfloat16 is due" in found.out
