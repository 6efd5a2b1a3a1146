"""One's own decode in a file: what is judged, and what is refused with a sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compare.bundle.bundle import BundleError, compare_files, save_bundle
from compare.protocol.arrays import to_torch
from compare.protocol.tensor_file import read_tensors, tensor_bytes
from compare.protocol.verdict import Status
from compare.run import registry
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.judge import evidence_of, judge
from compare.suites.table import make_inputs, parse_case

# Request 2 has no key on rank 1, and the last two rows belong to no request.
LINE = (
    "dcp-decode:lens=61+43+3,q=5+2+2,h=3,page=16,world=2,rank=1,interleave=4,pad_rows=2,max_q=8,"
    "stale=1,seed=1"
)
OTHER = "dcp-decode:lens=61+43+3,q=5+2+2,h=3,world=2,rank=1,seed=2"
MERGED = "dcp-decode:lens=61+43+3,q=5+2+2,h=3,world=4,rank=all,pad_rows=1,seed=3"
FLOAT8 = "dcp-decode:lens=61+43,q=5+2,h=3,world=2,kv=e4m3,seed=4"
FLOAT8_QUERIES = FLOAT8.replace("kv=e4m3", "kv=e4m3,q_dtype=e4m3")
DRAFT = "dcp-decode:lens=30+20,q=4+4,h=2,world=2,rank=1,causal=0,seed=5"


def inputs_of(line: str) -> DcpDecodeInputs:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, DcpDecodeInputs)
    return inputs


def own(inputs: DcpDecodeInputs) -> DcpDecodeInputs:
    """The same tensors without a case."""
    return dataclasses.replace(inputs, case=None)


def eager(inputs: DcpDecodeInputs) -> DcpDecodeResult:
    result = registry.in_process("torch", "cpu").run(inputs)
    assert isinstance(result, DcpDecodeResult)
    return result


def faulty(inputs: DcpDecodeInputs, **deviation) -> DcpDecodeResult:
    """What a kernel with this fault gives."""
    from torch_ref import DecodeVariant

    evidence = evidence_of(inputs)
    rows = evidence.oracle(np.arange(evidence.num_tokens), DecodeVariant(**deviation))
    return DcpDecodeResult(out=rows.out.astype(ml_dtypes.bfloat16), lse=rows.lse.astype(np.float32))


def rewrite(path: Path, metadata: dict[str, str] | None = None, **changes) -> None:
    tensors, old = read_tensors(path)
    tensors = {name: array for name, array in (tensors | changes).items() if array is not None}
    path.write_bytes(tensor_bytes(tensors, old if metadata is None else metadata))


@pytest.fixture(params=["case", "tensors"])
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A right result, saved by its case line or with its own input tensors."""
    inputs = inputs_of(LINE)
    path = tmp_path / "mine.safetensors"
    save_bundle(path, inputs if request.param == "case" else own(inputs), eager(inputs))
    return path


def test_a_right_result_passes_against_the_oracle_alone(mine):
    report = compare_files(mine)
    (row,) = report.rows
    assert row.verdict.status is Status.PASS, row.verdict.reason
    assert row.verdict.notes == ()
    assert row.verdict.rows_judged == row.verdict.rows_total == 33
    assert row.reference is None and row.candidate == str(mine)
    assert row.case in (str(parse_case(LINE)), f"dcp-decode of {mine}")
    assert report.exit_status == 0


@pytest.mark.parametrize("line", [FLOAT8, FLOAT8_QUERIES, DRAFT])
def test_every_word_of_a_call_comes_back(tmp_path, line):
    inputs = inputs_of(line)
    path = tmp_path / "own.safetensors"
    save_bundle(path, own(inputs), eager(inputs))
    assert read_tensors(path)[1]["input_sha256"] == inputs.sha256()
    assert compare_files(path).rows[0].verdict.status is Status.PASS


@pytest.mark.parametrize(
    ("line", "word", "text"),
    [
        (LINE, "sm_scale", "0.05"),
        (LINE, "dcp_rank", "0"),
        (LINE, "interleave", "1"),
        (DRAFT, "causal", "1"),
        (FLOAT8, "kv_scale", "0.5"),
        (FLOAT8_QUERIES, "q_scale", "0.5"),
    ],
)
def test_every_word_of_a_call_counts(tmp_path, line, word, text):
    inputs = inputs_of(line)
    path = tmp_path / "own.safetensors"
    save_bundle(path, own(inputs), eager(inputs))
    _, metadata = read_tensors(path)
    assert metadata[word] != text
    del metadata["input_sha256"]
    rewrite(path, metadata | {word: text})
    assert compare_files(path).exit_status == 1


def test_words_left_out_are_those_of_one_rank(tmp_path):
    inputs = inputs_of("dcp-decode:lens=30+20,q=4+1,h=2")
    path = tmp_path / "own.safetensors"
    save_bundle(path, own(inputs), eager(inputs))
    rewrite(path, {"suite": "dcp-decode", "sm_scale": str(576**-0.5)})
    assert compare_files(path).exit_status == 0


@pytest.mark.parametrize("text", ["0", "False"])
def test_a_draft_block_says_so_in_either_way(tmp_path, text):
    inputs = inputs_of(DRAFT)
    path = tmp_path / "own.safetensors"
    save_bundle(path, own(inputs), eager(inputs))
    rewrite(path, read_tensors(path)[1] | {"causal": text})
    assert compare_files(path).exit_status == 0


@pytest.mark.parametrize(
    ("deviation", "name"),
    [
        ({"bound": "plus_one"}, "bound-off-by-one"),
        ({"scale_power": 2}, "scale-twice"),
        ({"lse_base2": True}, "lse-base-2"),
    ],
)
def test_a_wrong_result_fails_under_its_name(mine, deviation, name):
    inputs = inputs_of(LINE)
    wrong = faulty(inputs, **deviation)
    rewrite(mine, out=wrong.out, lse=wrong.lse)
    report = compare_files(mine)
    assert report.exit_status == 1
    assert [found.name for found in report.rows[0].verdict.diagnosis] == [name]


def test_the_other_file_is_the_reference(mine, tmp_path):
    inputs = inputs_of(LINE)
    theirs = tmp_path / "theirs.safetensors"
    save_bundle(theirs, inputs, eager(inputs))
    (row,) = compare_files(mine, theirs).rows
    assert row.reference == str(theirs)
    assert row.verdict.status is Status.PASS
    assert row.verdict.against_reference["lse"].max_abs == 0


def test_a_reference_needs_neither_inputs_nor_a_suite(mine, tmp_path):
    tensors, _ = read_tensors(mine)
    theirs = tmp_path / "theirs.safetensors"
    theirs.write_bytes(tensor_bytes({name: tensors[name] for name in ("out", "lse")}, {}))
    assert compare_files(mine, theirs).exit_status == 0


def test_a_reference_may_have_its_own_convention(mine, tmp_path):
    right = eager(inputs_of(LINE))
    flash_mla = np.where(np.isinf(right.lse), np.inf, right.lse / np.log(2)).astype(np.float32)
    assert np.isposinf(flash_mla).any()
    theirs = tmp_path / "theirs.safetensors"
    other = dataclasses.replace(right, lse=flash_mla)
    save_bundle(theirs, LINE, other, lse="base2", empty_lse="+inf")
    (row,) = compare_files(mine, theirs).rows
    assert row.verdict.reference_failed is None
    assert row.verdict.against_reference["lse"].max_abs < 1e-6
    assert sum(note.startswith("reference: ") for note in row.verdict.notes) == 2


def test_a_reference_of_another_call_or_suite_is_refused(mine, tmp_path):
    theirs = tmp_path / "theirs.safetensors"
    save_bundle(theirs, inputs_of(OTHER), eager(inputs_of(OTHER)))
    with pytest.raises(BundleError, match=r"theirs\.safetensors is another call"):
        compare_files(mine, theirs)
    prefill = "sparse-prefill:s_q=1,s_kv=64,h=2,topk=64"
    save_bundle(
        theirs, prefill, registry.in_process("torch", "cpu").run(make_inputs(parse_case(prefill)))
    )
    with pytest.raises(BundleError, match=r"theirs\.safetensors is of sparse-prefill; .*mine"):
        compare_files(mine, theirs)


def test_an_undeclared_convention_is_named_and_a_declared_one_converted(tmp_path):
    inputs = inputs_of(LINE)
    right = eager(inputs)
    path = tmp_path / "mine.safetensors"
    base2 = dataclasses.replace(right, lse=(right.lse / np.log(2)).astype(np.float32))
    save_bundle(path, own(inputs), base2)
    (row,) = compare_files(path).rows
    assert [found.name for found in row.verdict.diagnosis] == ["lse-base-2"]
    save_bundle(path, own(inputs), base2, lse="base2")
    (row,) = compare_files(path).rows
    assert row.verdict.status is Status.PASS, row.verdict.reason
    assert row.verdict.notes == ("lse is declared base 2 and was multiplied by ln 2",)

    plus = dataclasses.replace(right, lse=np.where(np.isinf(right.lse), np.inf, right.lse))
    save_bundle(path, own(inputs), plus)
    (row,) = compare_files(path).rows
    assert "empty-lse-plus-inf" in [found.name for found in row.verdict.diagnosis]
    save_bundle(path, own(inputs), plus, empty_lse="+inf")
    assert compare_files(path).exit_status == 0


def test_all_ranks_merged_are_judged_as_a_run_judges_them(tmp_path):
    """Each rank's out in bfloat16 leaves more room than float32, which a file has to say."""
    inputs = inputs_of(MERGED)
    right = eager(inputs)
    path = tmp_path / "merged.safetensors"
    for parts in ("float32", "bfloat16", "bfloat16 twice"):
        result = dataclasses.replace(right, parts=parts)
        save_bundle(path, inputs, result)
        assert read_tensors(path)[1]["parts"] == parts
        (row,) = compare_files(path).rows
        assert row.case == str(inputs.case)
        assert row.verdict.status is Status.PASS, row.verdict.reason
        assert row.verdict.share == judge(inputs, result).share
    rewrite(path, {"case": MERGED})
    (row,) = compare_files(path).rows
    assert row.verdict.share == judge(inputs, right).share


def test_a_wrong_merge_fails_under_its_name(tmp_path):
    inputs = inputs_of(MERGED)
    path = tmp_path / "merged.safetensors"
    save_bundle(path, inputs, faulty(inputs, empty_lse="0"))
    report = compare_files(path)
    assert report.exit_status == 1
    assert [found.name for found in report.rows[0].verdict.diagnosis] == ["empty-rank-lse-zero"]


def test_some_rows_of_out_are_enough(tmp_path):
    inputs = inputs_of(LINE)
    result = eager(inputs)
    rows = np.array([0, 7, 20, 32], np.int32)
    some = dataclasses.replace(result, out=result.out.reshape(33, 512)[rows], out_rows=rows)
    save_bundle(tmp_path / "some.safetensors", inputs, some)
    assert compare_files(tmp_path / "some.safetensors").exit_status == 0


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with its own input tensors."""
    inputs = inputs_of(LINE)
    save_bundle(tmp_path / "own.safetensors", own(inputs), eager(inputs))
    return tmp_path / "own.safetensors"


BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"total_lens": None},
            " lacks the input total_lens: give q, kv_cache, block_table, seq_lens, "
            "query_start_loc, total_lens and sm_scale, or a case line",
        ),
        ({"query_start_loc": None}, " lacks the input query_start_loc: give q"),
        ({"lse": None}, " lacks the result lse; out and lse are needed"),
        (
            {"kv": np.zeros(1)},
            " holds the tensor kv; accepted are q, kv_cache.*sparse-prefill has",
        ),
        (
            {"q": np.zeros((11, 3, 576), np.float32)},
            r": q is float32 \[11, 3, 576\]; accepted is bfloat16 or float8_e4m3fn \[T, H, 576\]",
        ),
        (
            {"kv_cache": np.zeros((9, 16, 512), BF16)},
            r": kv_cache is bfloat16 \[9, 16, 512\]; accepted is .* \[pages, P, 576\]",
        ),
        (
            {"seq_lens": np.zeros(3, np.int64)},
            r": seq_lens is int64 \[3\]; accepted is int32",
        ),
        ({"block_table": np.zeros(3, np.int32)}, r".* accepted is int32 \[B, max_pages\]"),
        ({"seq_lens": np.zeros(4, np.int32)}, r": seq_lens is int32 \[4\], so B is 4, and 3 in"),
        (
            {"query_start_loc": np.array([0, 5, 7, 9, 9], np.int32)},
            r": query_start_loc is int32 \[5\], so B is 4, and 3 in block_table",
        ),
        (
            {"query_start_loc": np.array([0, 5.5, 7, 9])},
            r": query_start_loc is float64 \[4\]; accepted is int32",
        ),
        (
            {"out_rows": np.zeros((3, 1), np.int32)},
            r": out_rows is int32 \[3, 1\]; accepted is",
        ),
        ({"total_lens": np.array([61, 43, 4], np.int32)}, " was computed from inputs with SHA-256"),
    ],
)
def test_tensors_that_do_not_fit_are_named(bundle, changes, sentence):
    rewrite(bundle, **changes)
    with pytest.raises(BundleError, match=f"own.safetensors{sentence}"):
        compare_files(bundle)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"sm_scale": None}, "sm_scale is '' in the metadata; accepted is a finite number"),
        ({"sm_scale": "inf"}, "sm_scale is 'inf' in the metadata"),
        ({"suite": None}, "holds the tensor block_table.*: give suite=dcp-decode in the metadata"),
        ({"suite": "dcp-decod"}, "suite=dcp-decod in its metadata; accepted is .* or dcp-decode"),
        ({"dcp_rank": "2"}, "own.safetensors: dcp_rank: 2; accepted"),
        ({"dcp_rank": "-1"}, "dcp_rank is '-1' in the metadata; accepted is a whole number from 0"),
        ({"dcp_world": "two"}, "dcp_world is 'two' in the metadata; accepted is a whole number"),
        ({"interleave": "48"}, "own.safetensors: interleave: 48"),
        ({"causal": "yes"}, "causal is 'yes' in the metadata; accepted is 0 | 1 | False | True"),
        ({"max_query_len": "4"}, "own.safetensors: max_query_len: 4; accepted: 5 and more"),
        ({"kv_scale": "nan"}, "kv_scale is 'nan' in the metadata; accepted is a finite number"),
        ({"kv_scale": "0.5"}, "own.safetensors: kv_scale: 0.5 with a bf16 kv_cache"),
        ({"q_scale": "0.5"}, "own.safetensors: q_scale: 0.5 with a bf16 q"),
        (
            {"parts": "float16"},
            "parts is 'float16' in the metadata; accepted is float32 | bf",
        ),
        ({"case": LINE}, "names a case in its metadata and holds the input q too"),
    ],
)
def test_metadata_that_does_not_fit_is_named(bundle, metadata, sentence):
    _, old = read_tensors(bundle)
    del old["input_sha256"]
    new = {name: text for name, text in (old | metadata).items() if text is not None}
    rewrite(bundle, new)
    with pytest.raises(BundleError, match=sentence.replace("|", r"\|")):
        compare_files(bundle)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block_table": np.full((3, 4), 99, np.int32)}, "block_table: page 99 at column 0 of"),
        (
            {"block_table": np.zeros((3, 1), np.int32)},
            "block_table: width 1; request 0 has 29",
        ),
        ({"q": np.zeros((8, 3, 576), BF16)}, "q: 8 rows; query_start_loc counts 9 tokens"),
    ],
)
def test_values_that_no_implementation_may_be_given_are_named(bundle, changes, sentence):
    _, metadata = read_tensors(bundle)
    del metadata["input_sha256"]
    rewrite(bundle, metadata, **changes)
    with pytest.raises(BundleError, match=f"own.safetensors: {sentence}"):
        compare_files(bundle)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"case": "dcp-decode:lens=9,q=1,wrld=2"}, "unknown case .* has no key 'wrld'"),
        ({"case": "decode-plan:lens=9,q=1"}, "has a case of decode-plan; bundles hold .* or dcp-d"),
        ({"case": OTHER}, "was computed from inputs with SHA-256"),
        ({"suite": "sparse-prefill"}, "suite=sparse-prefill in its metadata and a case of dcp-d"),
        ({"dcp_world": "2"}, "names a case in its metadata and gives dcp_world too"),
    ],
)
def test_a_case_that_does_not_fit_is_named(tmp_path, metadata, sentence):
    path = tmp_path / "mine.safetensors"
    save_bundle(path, LINE, eager(inputs_of(LINE)))
    rewrite(path, read_tensors(path)[1] | metadata)
    with pytest.raises(BundleError, match=sentence):
        compare_files(path)


def test_results_of_another_shape_or_dtype_fail_as_such(mine):
    tensors, _ = read_tensors(mine)
    rewrite(mine, out=tensors["out"].astype(np.float32))
    assert compare_files(mine).rows[0].verdict.status is Status.DTYPE
    rewrite(mine, out=tensors["out"], lse=np.ascontiguousarray(tensors["lse"].T))
    report = compare_files(mine)
    assert report.rows[0].verdict.status is Status.SHAPE
    assert report.exit_status == 1


@pytest.mark.parametrize("line", [LINE, FLOAT8_QUERIES])
def test_a_mapping_and_a_tuple_are_saved_as_judge_takes_them(tmp_path, line):
    inputs = inputs_of(line)
    result = eager(inputs)
    arrays = ("q", "kv_cache", "block_table", "seq_lens", "query_start_loc", "total_lens")
    words = ("sm_scale", "dcp_rank", "dcp_world", "interleave", "max_query_len")
    call = {name: to_torch(getattr(inputs, name)) for name in arrays}
    call |= {name: getattr(inputs, name) for name in words}
    scales = {name: getattr(inputs, name) for name in ("kv_scale", "q_scale")}
    call |= {name: value if value is None else np.float32(value) for name, value in scales.items()}
    as_tensors, as_objects = tmp_path / "tensors.safetensors", tmp_path / "objects.safetensors"
    save_bundle(as_tensors, call, (to_torch(result.out), to_torch(result.lse)), suite="dcp-decode")
    save_bundle(as_objects, own(inputs), result)
    (found, metadata), (expected, said) = map(read_tensors, (as_tensors, as_objects))
    assert metadata == said
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in expected.items()
    }
    assert compare_files(as_tensors).exit_status == 0


def test_shards_of_a_callers_own_are_refused(tmp_path):
    inputs = inputs_of(MERGED)
    with pytest.raises(ValueError, match="shards of a caller's own can't be kept in a bundle"):
        save_bundle(tmp_path / "x", own(inputs), eager(inputs))
    assert not (tmp_path / "x").exists()
