"""One's own tensors in a safetensors file, judged without any kernel: `compare MINE [THEIRS]`.

A bundle holds the result of one sparse prefill call: `out` (bfloat16 [T, H, 512]) and `lse`
(float32 [T, H]), perhaps `max_logits` (float32 [T, H]), or `out` of some (token, head) rows [R,
512] with `out_rows` (int32 [R], token * H + head). What it was computed from is in its metadata:

- ``case``: a case line, whose inputs are made here (`input_sha256`, where given, must be theirs);
or - ``suite`` (sparse-prefill) and ``sm_scale``, beside the input tensors q (bfloat16 [T, H, D]),
kv   (bfloat16 [S, D] or [S, 1, D]), indices (int32 [T, K] or [T, 1, K]), and perhaps attn_sink
  (float32 [H]) and topk_length (int32 [T]).

THEIRS is a bundle of the same call, of which only the result is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compare.cases.case import Case, CaseError
from compare.cases.inputs import SparsePrefillInputs
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.report.report import Report, Row
from compare.run.result import SparsePrefillResult
from compare.tools.tensor_file import read_tensors, tensor_bytes, write_bytes

SUITE = SparsePrefillCase.suite
_RESULTS = ("out", "lse", "max_logits", "out_rows")
_INPUTS = {
    "q": ("bfloat16", "T H D"),
    "kv": ("bfloat16", "S D"),
    "indices": ("int32", "T K"),
    "attn_sink": ("float32", "H"),
    "topk_length": ("int32", "T"),
}
_OPTIONAL_INPUTS = ("attn_sink", "topk_length")


class BundleError(ValueError):
    """A bundle can't be understood; the message is a sentence with the file, what was found and
    what is accepted."""


def compare_files(
    mine: Path | str, theirs: Path | str | None = None, *, profile: str = "calibrated"
) -> Report:
    """Judges the result in `mine` against the oracle and, where given, the one in `theirs`.

    profile: calibrated, flashmla or both. Raises BundleError for files that aren't bundles of one
    call.
    """
    from compare.judging.sparse_prefill import judge
    from compare.report.environment import environment

    started = time.perf_counter()
    mine = Path(mine)
    tensors, metadata = _read(mine)
    inputs = _inputs(mine, tensors, metadata)
    candidate = _result(mine, tensors)
    reference = None
    if theirs is not None:
        theirs = Path(theirs)
        reference = _reference(theirs, inputs)
    verdict = judge(inputs, candidate, reference, profile=profile)
    row = Row(
        case=str(inputs.case) if inputs.case else f"{SUITE} of {mine}",
        candidate=str(mine),
        reference=None if theirs is None else str(theirs),
        verdict=verdict,
        seconds=0.0,
        files=(str(mine),) if theirs is None else (str(mine), str(theirs)),
    )
    return Report(
        rows=(row,),
        environment=environment(),
        profile=profile,
        seconds=time.perf_counter() - started,
    )


def save_bundle(
    path: Path | str, inputs: SparsePrefillInputs | Mapping[str, Any] | Case | str, result: Any
) -> None:
    """Writes one call as a bundle: inputs that came from a case as its line, others as tensors.

    inputs and result: as `compare.judge` takes them for sparse-prefill: a mapping of the arguments,
    a case or its line, and (out, max_logits, lse), a mapping or an object with these names. Results
    without a max_logits, and a SparsePrefillResult with rows of out only, are taken as they are;
    notes aren't kept.

    ValueError for arguments that a bundle can't hold, TypeError for what isn't a result.
    """
    from compare.run.answers import sparse_prefill_result
    from compare.run.api import as_inputs

    call = as_inputs(SUITE, inputs)
    assert isinstance(call, SparsePrefillInputs)
    result = sparse_prefill_result(result, "result")
    if call.d_v != 512:
        raise ValueError(f"d_v is {call.d_v}; a bundle holds calls with d_v 512")
    metadata = {"suite": SUITE, "input_sha256": call.sha256()}
    tensors = {name: getattr(result, name) for name in _RESULTS}
    if call.case is not None:
        metadata["case"] = str(call.case)
    elif call.chunks is not None:
        raise ValueError("chunks of a caller's own can't be kept in a bundle; leave them None")
    else:
        metadata["sm_scale"] = repr(float(call.sm_scale))
        tensors |= {name: getattr(call, name) for name in _INPUTS}
    held = {name: array for name, array in tensors.items() if array is not None}
    write_bytes(Path(path), tensor_bytes(held, metadata))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        tensors, metadata = read_tensors(path)
    except ValueError as error:
        raise BundleError(f"{path} can't be taken as a bundle: {error}") from error
    unknown = sorted(tensors.keys() - {*_RESULTS, *_INPUTS})
    if unknown:
        raise BundleError(
            f"{path} holds the tensor {unknown[0]}; accepted are {', '.join([*_INPUTS, *_RESULTS])}"
        )
    suite = metadata.get("suite", SUITE)
    if suite != SUITE:
        raise BundleError(f"{path} has suite={suite} in its metadata; accepted is {SUITE}")
    return tensors, metadata


def _inputs(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> SparsePrefillInputs:
    """The call that a bundle names, by its case or by its tensors."""
    given = [name for name in _INPUTS if name in tensors]
    if "case" in metadata:
        if given:
            raise BundleError(
                f"{path} names a case in its metadata and holds the input {given[0]} too; "
                "leave one of them out"
            )
        inputs = _inputs_of_case(path, metadata["case"])
    else:
        inputs = _inputs_of_tensors(path, tensors, metadata)
    expected = metadata.get("input_sha256")
    if expected is not None and inputs.sha256() != expected:
        raise BundleError(
            f"{path} was computed from inputs with SHA-256 {expected[:12]} and these have "
            f"{inputs.sha256()[:12]}: they were changed, or another generator made them"
        )
    return inputs


def _inputs_of_case(path: Path, line: str) -> SparsePrefillInputs:
    from compare.suites import make_inputs, parse_case

    try:
        case = parse_case(line)
    except CaseError as error:
        raise BundleError(f"{path} has an unknown case in its metadata: {error}") from error
    if not isinstance(case, SparsePrefillCase):
        raise BundleError(f"{path} has a case of {case.suite}; bundles hold {SUITE}")
    inputs = make_inputs(case)
    assert isinstance(inputs, SparsePrefillInputs)
    return inputs


def _inputs_of_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> SparsePrefillInputs:
    missing = [n for n in _INPUTS if n not in tensors and n not in _OPTIONAL_INPUTS]
    if missing:
        raise BundleError(
            f"{path} lacks the input {missing[0]}: give q, kv, indices and sm_scale, or a case "
            "line as case in the metadata"
        )
    arrays = {name: tensors[name] for name in _INPUTS if name in tensors}
    for name in ("kv", "indices"):  # FlashMLA's own shapes, with an axis for the one latent head
        if arrays[name].ndim == 3 and arrays[name].shape[1] == 1:
            arrays[name] = arrays[name][:, 0]
    sizes: dict[str, tuple[int, str]] = {}
    for name, array in arrays.items():
        _check_tensor(path, name, array, sizes)
    return SparsePrefillInputs(
        q=arrays["q"],
        kv=arrays["kv"],
        indices=arrays["indices"],
        attn_sink=arrays.get("attn_sink"),
        topk_length=arrays.get("topk_length"),
        sm_scale=_sm_scale(path, metadata),
    )


def _check_tensor(
    path: Path, name: str, array: np.ndarray, sizes: dict[str, tuple[int, str]]
) -> None:
    """Checks dtype and axes; `sizes` holds each axis' size and the tensor that set it."""
    dtype, axes = _INPUTS[name]
    shape = f"{array.dtype.name} {list(array.shape)}"
    if array.dtype.name != dtype or array.ndim != len(axes.split()):
        accepted = f"{dtype} [{axes.replace(' ', ', ')}]"
        raise BundleError(f"{path}: {name} is {shape}; accepted is {accepted}")
    for axis, size in zip(axes.split(), array.shape, strict=True):
        first, setter = sizes.setdefault(axis, (size, name))
        if size != first:
            raise BundleError(
                f"{path}: {name} is {shape}, so {axis} is {size}, and {first} in {setter}"
            )
    if name == "q" and array.shape[2] not in (512, 576):
        raise BundleError(f"{path}: q is {shape}; accepted for D are 512 and 576")
    if name == "q" and not 1 <= array.shape[1] <= 128:
        raise BundleError(f"{path}: q is {shape}; accepted for H are 1 to 128")


def _sm_scale(path: Path, metadata: Mapping[str, str]) -> float:
    text = metadata.get("sm_scale", "")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise BundleError(
            f"{path}: sm_scale is {text!r} in the metadata; accepted is a finite number"
        )
    return scale


def _result(path: Path, tensors: Mapping[str, np.ndarray]) -> SparsePrefillResult:
    missing = [name for name in ("out", "lse") if name not in tensors]
    if missing:
        raise BundleError(f"{path} lacks the result {missing[0]}; out and lse are needed")
    rows = tensors.get("out_rows")
    if rows is not None and (rows.dtype != np.int32 or rows.ndim != 1):
        shape = f"{rows.dtype.name} {list(rows.shape)}"
        raise BundleError(f"{path}: out_rows is {shape}; accepted is int32 [R]")
    return SparsePrefillResult(
        out=tensors["out"], lse=tensors["lse"], max_logits=tensors.get("max_logits"), out_rows=rows
    )


def _reference(path: Path, inputs: SparsePrefillInputs) -> SparsePrefillResult:
    """The result in THEIRS; whatever it says about its inputs must be MINE's."""
    tensors, metadata = _read(path)
    says_inputs = "case" in metadata or any(name in tensors for name in _INPUTS)
    found = (
        _inputs(path, tensors, metadata).sha256() if says_inputs else metadata.get("input_sha256")
    )
    if found is not None and found != inputs.sha256():
        raise BundleError(
            f"{path} is another call: its inputs have SHA-256 {found[:12]} and the other file's "
            f"{inputs.sha256()[:12]}"
        )
    return _result(path, tensors)
