"""One's own tensors in a file: what is judged, and what is refused with a sentence."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compare.bundle.bundle import BundleError, compare_files, save_bundle
from compare.judging.attention_call import SparsePrefillInputs
from compare.protocol.arrays import to_torch
from compare.protocol.tensor_file import read_tensors, tensor_bytes
from compare.protocol.verdict import Status
from compare.report.summary import program, reproducer
from compare.suites.table import make_inputs, parse_case

LINE = "sparse-prefill:s_q=2,s_kv=100,h=4,topk=64,sink=mixed,length=ragged,seed=1"
OTHER = "sparse-prefill:s_q=2,s_kv=100,h=4,topk=64,seed=2"


def inputs_of(line: str) -> SparsePrefillInputs:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, SparsePrefillInputs)
    return inputs


def own(inputs: SparsePrefillInputs) -> SparsePrefillInputs:
    """The same tensors without a case."""
    return dataclasses.replace(inputs, case=None)


def rewrite(path: Path, metadata: dict[str, str] | None = None, **changes) -> None:
    tensors, old = read_tensors(path)
    tensors = {name: array for name, array in (tensors | changes).items() if array is not None}
    path.write_bytes(tensor_bytes(tensors, old if metadata is None else metadata))


@pytest.fixture(params=["case", "tensors"])
def mine(request: pytest.FixtureRequest, tmp_path: Path, eager) -> Path:
    """A right result, saved by its case line or with its own input tensors."""
    inputs = inputs_of(LINE)
    path = tmp_path / "mine.safetensors"
    save_bundle(path, inputs if request.param == "case" else own(inputs), eager().run(inputs))
    return path


def test_a_right_result_passes_against_the_oracle_alone(mine):
    report = compare_files(mine)
    (row,) = report.rows
    assert row.verdict.status is Status.PASS, row.verdict.reason
    assert row.reference is None
    assert row.candidate == str(mine)
    assert report.exit_status == 0


def test_one_wrong_row_fails(mine):
    tensors, _ = read_tensors(mine)
    out = np.array(tensors["out"])
    out[1, 2] = -out[1, 2] + ml_dtypes.bfloat16(1)
    rewrite(mine, out=out)
    report = compare_files(mine)
    assert report.rows[0].verdict.status in (Status.NUMERIC, Status.SPECIAL)
    assert report.exit_status == 1


def test_the_other_file_is_the_reference(mine, tmp_path, eager):
    inputs = inputs_of(LINE)
    theirs = tmp_path / "theirs.safetensors"
    save_bundle(theirs, inputs, eager().run(inputs))
    (row,) = compare_files(mine, theirs).rows
    assert row.reference == str(theirs)
    assert row.verdict.status is Status.PASS
    assert row.verdict.against_reference["lse"].max_abs == 0


def test_a_reference_needs_no_inputs(mine, tmp_path):
    tensors, _ = read_tensors(mine)
    theirs = tmp_path / "theirs.safetensors"
    results = {name: tensors[name] for name in ("out", "lse", "max_logits")}
    theirs.write_bytes(tensor_bytes(results, {}))
    assert compare_files(mine, theirs).exit_status == 0


def test_a_reference_of_another_call_is_refused(mine, tmp_path, eager):
    theirs = tmp_path / "theirs.safetensors"
    save_bundle(theirs, inputs_of(OTHER), eager().run(inputs_of(OTHER)))
    with pytest.raises(BundleError, match=r"theirs\.safetensors is another call"):
        compare_files(mine, theirs)


def test_some_rows_of_out_are_enough(tmp_path, eager):
    inputs = inputs_of(LINE)
    result = eager().run(inputs)
    rows = np.array([0, 3, 7], np.int32)
    some = dataclasses.replace(result, out=result.out.reshape(8, 512)[rows], out_rows=rows)
    save_bundle(tmp_path / "some.safetensors", inputs, some)
    (row,) = compare_files(tmp_path / "some.safetensors").rows
    assert row.verdict.status is Status.PASS


def test_strided_inputs_come_back_as_values(tmp_path, eager):
    inputs = inputs_of(LINE.replace("seed", "strided=1,seed"))
    assert not inputs.q.flags.c_contiguous
    save_bundle(tmp_path / "own.safetensors", own(inputs), eager().run(inputs))
    assert compare_files(tmp_path / "own.safetensors").exit_status == 0


def test_max_logits_may_be_missing(mine):
    rewrite(mine, max_logits=None)
    verdict = compare_files(mine).rows[0].verdict
    assert verdict.status is Status.PASS
    assert "max_logits" in " ".join(verdict.not_compared)


def test_flash_mla_shapes_with_a_head_axis_are_taken(tmp_path, eager):
    inputs = own(inputs_of(LINE))
    path = tmp_path / "own.safetensors"
    save_bundle(path, inputs, eager().run(inputs))
    rewrite(path, kv=np.ascontiguousarray(inputs.kv)[:, None], indices=inputs.indices[:, None])
    assert compare_files(path).exit_status == 0


@pytest.fixture
def bundle(tmp_path: Path, eager) -> Path:
    """A bundle with its own input tensors."""
    inputs = own(inputs_of(LINE))
    save_bundle(tmp_path / "own.safetensors", inputs, eager().run(inputs))
    return tmp_path / "own.safetensors"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": None}, "lacks the input q: give q, kv, indices and sm_scale, or a case line"),
        ({"out": None}, "lacks the result out; out and lse are needed"),
        ({"output": np.zeros(1)}, "holds the tensor output; accepted are q, kv"),
        (
            {"indices": np.zeros((2, 64), np.int64)},
            r"indices is int64 \[2, 64\]; accepted is int32",
        ),
        ({"indices": np.zeros((3, 64), np.int32)}, r"indices is int32 \[3, 64\], so T is 3, and 2"),
        ({"q": np.zeros((2, 4, 512), np.float32)}, r"q is float32 .*; accepted is bfloat16 \[T, H"),
        ({"q": np.zeros((2, 4, 500), ml_dtypes.bfloat16)}, "so D is 512, and 500 in q"),
        (
            {"attn_sink": np.zeros(5, np.float32)},
            r"attn_sink is float32 \[5\], so H is 5, and 4 in q",
        ),
        ({"out_rows": np.zeros(3, np.int64)}, r"out_rows is int64 \[3\]; accepted is int32"),
        ({"kv": np.zeros((100, 512), ml_dtypes.bfloat16)}, "inputs with SHA-256 .* were changed"),
    ],
)
def test_tensors_that_do_not_fit_are_named(bundle, changes, sentence):
    rewrite(bundle, **changes)
    with pytest.raises(BundleError, match=f"own.safetensors.* {sentence}"):
        compare_files(bundle)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {
                "q": np.zeros((2, 4, 500), ml_dtypes.bfloat16),
                "kv": np.zeros((100, 500), ml_dtypes.bfloat16),
            },
            "q: width D = 500; accepted are 512 and 576",
        ),
        ({"topk_length": np.array([3, 65], np.int32)}, "topk_length: 65 in row 1; accepted are 0"),
    ],
)
def test_values_that_no_implementation_may_be_given_are_named(bundle, changes, sentence):
    rewrite(bundle, {"sm_scale": "1"}, **changes)
    with pytest.raises(BundleError, match=f"own.safetensors: {sentence}"):
        compare_files(bundle)


@pytest.mark.parametrize("saved", ["metadata", "by hand"])
def test_a_declared_base_2_lse_and_sign_of_empty_rows_are_converted_and_said(
    tmp_path, eager, saved
):
    inputs = inputs_of(LINE.replace("seed", "empty_rows=1,seed"))
    result = eager().run(inputs)
    assert np.isposinf(result.lse).any()
    theirs = np.where(np.isinf(result.lse), -np.inf, result.lse / np.log(2)).astype(np.float32)
    other = dataclasses.replace(result, lse=theirs)
    path = tmp_path / "other.safetensors"
    declared = {"lse": "base2", "empty_lse": "-inf"}
    if saved == "metadata":
        save_bundle(path, inputs, other, **declared)
    else:
        save_bundle(path, inputs, other)
        assert compare_files(path).exit_status == 1
        rewrite(path, read_tensors(path)[1] | declared)
    (row,) = compare_files(path).rows
    assert row.verdict.status is Status.PASS, row.verdict.reason
    assert "declared base 2" in " ".join(row.verdict.notes)
    assert "declared -inf and was turned into +inf" in " ".join(row.verdict.notes)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "sm_scale is '' in the metadata; accepted is a finite number"),
        ({"sm_scale": "nan"}, "sm_scale is 'nan'"),
        ({"sm_scale": "1", "suite": "dcp"}, "has suite=dcp in its metadata"),
        ({"case": LINE}, "names a case in its metadata and holds the input q too"),
        ({"sm_scale": "1", "lse": "base-2"}, "lse is 'base-2' in .*; accepted is natural | base2"),
        ({"sm_scale": "1", "empty_lse": "0"}, r"empty_lse is '0' in .*; accepted is \+inf | -inf"),
    ],
)
def test_metadata_that_does_not_fit_is_named(bundle, metadata, sentence):
    rewrite(bundle, metadata)
    with pytest.raises(BundleError, match=sentence):
        compare_files(bundle)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("sparse-prefill:s_w=2", "has an unknown case in its metadata: .* has no key 's_w'"),
        ("prefill-plan:seq=1,q=1", "has a case of prefill-plan; bundles hold sparse-prefill"),
        (OTHER, "was computed from inputs with SHA-256"),
    ],
)
def test_a_case_that_does_not_fit_is_named(tmp_path, eager, line, sentence):
    inputs = inputs_of(LINE)
    path = tmp_path / "mine.safetensors"
    save_bundle(path, inputs, eager().run(inputs))
    _, metadata = read_tensors(path)
    rewrite(path, metadata | {"case": line})
    with pytest.raises(BundleError, match=sentence):
        compare_files(path)


def test_a_file_that_is_none_is_named(tmp_path):
    with pytest.raises(
        BundleError, match=r"gone\.safetensors can't be taken as a bundle: there is no"
    ):
        compare_files(tmp_path / "gone.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(BundleError, match="isn't a readable safetensors file"):
        compare_files(tmp_path / "text.safetensors")


def test_chunks_of_a_callers_own_are_refused(tmp_path, eager):
    inputs = own(inputs_of(LINE))
    with pytest.raises(ValueError, match="chunks of a caller's own"):
        save_bundle(
            tmp_path / "x", dataclasses.replace(inputs, chunks=((0, 2),)), eager().run(inputs)
        )


@pytest.mark.parametrize("beside", [False, True])
def test_the_reproducer_of_files_is_the_command_that_reads_them(tmp_path, eager, beside):
    inputs = inputs_of(LINE)
    result = eager().run(inputs)
    paths = [tmp_path / "lse in bits.safetensors", tmp_path / "theirs.safetensors"]
    wrong = dataclasses.replace(result, lse=result.lse * np.float32(1.4427))
    save_bundle(paths[0], own(inputs), wrong)
    save_bundle(paths[1], own(inputs), result)
    paths = paths[: 1 + beside]
    report = compare_files(*paths, profile="both")
    assert report.exit_status == 1
    words = shlex.split(reproducer(report.rows[0], report).removeprefix(program()))
    assert words == ["compare", *map(str, paths), "--profile", "both"]


def test_a_mapping_and_a_tuple_are_saved_as_judge_takes_them(tmp_path, eager):
    inputs = inputs_of(LINE)
    result = eager().run(inputs)
    call = {
        "q": to_torch(inputs.q),
        "kv": to_torch(inputs.kv)[:, None],
        "indices": to_torch(inputs.indices)[:, None],
        "sm_scale": inputs.sm_scale,
        "attn_sink": to_torch(inputs.attn_sink),
        "topk_length": to_torch(inputs.topk_length),
    }
    answer = tuple(to_torch(a) for a in (result.out, result.max_logits, result.lse))
    as_tensors, as_objects = tmp_path / "tensors.safetensors", tmp_path / "objects.safetensors"
    save_bundle(as_tensors, call, answer)
    save_bundle(as_objects, own(inputs), result)
    (found, metadata), (expected, said) = map(read_tensors, (as_tensors, as_objects))
    assert metadata == said
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in expected.items()
    }
    assert compare_files(as_tensors).exit_status == 0


def test_a_case_line_is_saved_as_the_case(tmp_path, eager):
    path = tmp_path / "case.safetensors"
    save_bundle(path, LINE, eager().run(inputs_of(LINE)))
    assert read_tensors(path)[1]["case"] == LINE


def test_what_is_no_call_or_no_result_is_refused_before_anything_is_written(tmp_path, eager):
    inputs = inputs_of(LINE)
    path = tmp_path / "none.safetensors"
    with pytest.raises(ValueError, match="inputs: kv is missing"):
        save_bundle(path, {"q": inputs.q}, eager().run(inputs))
    with pytest.raises(TypeError, match="result"):
        save_bundle(path, inputs, inputs.q)
    assert not path.exists()


def test_words_of_the_metadata_that_mean_nothing_are_said(bundle):
    _, metadata = read_tensors(bundle)
    rewrite(bundle, metadata | {"format": "pt", "sm_scales": "0.3", "author": "me"})
    (row,) = compare_files(bundle).rows
    assert row.verdict.status is Status.PASS
    assert row.verdict.notes[-1] == f"not read from the metadata of {bundle}: author, sm_scales"


def test_words_beside_a_case_are_refused(tmp_path, eager):
    path = tmp_path / "case.safetensors"
    save_bundle(path, LINE, eager().run(inputs_of(LINE)))
    rewrite(path, read_tensors(path)[1] | {"sm_scale": "0.5"})
    with pytest.raises(BundleError, match="names a case in its metadata and gives sm_scale too"):
        compare_files(path)


def test_an_lse_of_another_convention_is_refused_where_it_is_saved(tmp_path, eager):
    with pytest.raises(ValueError, match="lse: 'log2'; accepted are natural and base2"):
        save_bundle(tmp_path / "x", LINE, eager().run(inputs_of(LINE)), lse="log2")
    assert not (tmp_path / "x").exists()


def test_suites_without_tensors_have_no_bundle(tmp_path):
    with pytest.raises(ValueError, match="suite: decode-plan; bundles hold sparse-prefill or dcp"):
        save_bundle(tmp_path / "x", "decode-plan:lens=9,q=1", ())
