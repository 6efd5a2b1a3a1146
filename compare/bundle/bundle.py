"""One's own tensors in a safetensors file, judged without any kernel: `compare MINE [THEIRS]`.

A bundle holds the result of one call: `out` (bfloat16 [T, H, 512]) and `lse` (float32 [T, H]), or
`out` of some (token, head) rows [R, 512] with `out_rows` (int32 [R], token * H + head); of
sparse-prefill perhaps `max_logits` (float32 [T, H]). What it was computed from is either

- a case: its line as ``case`` in the metadata; its inputs are made here. With rank=all the result
  is that of all ranks merged;
- or the call: ``suite`` (sparse-prefill, which may be left out, or dcp-decode) and ``sm_scale`` in
  the metadata, beside the input tensors.

The tensors of sparse-prefill are q (bfloat16 [T, H, D]), kv (bfloat16 [S, D] or [S, 1, D]), indices
(int32 [T, K] or [T, 1, K]), and perhaps attn_sink (float32 [H]) and topk_length (int32 [T]). Those
of dcp-decode, one rank's call, are q [T, H, 576] and kv_cache [pages, P, 576] (each bfloat16 or
float8_e4m3fn), block_table [B, max_pages], seq_lens [B], query_start_loc [B + 1] and total_lens [B]
(int32 all four), with ``max_query_len``, ``dcp_rank``, ``dcp_world``, ``interleave``, ``causal`` (1
or 0), ``kv_scale`` and ``q_scale`` in the metadata where they aren't the defaults of
`compare.judge`.

Further metadata: ``lse`` (natural, or base2: lse is multiplied by ln 2 before it is judged);
``empty_lse`` (+inf or -inf, the lse of a row without a key; the default is the suite's: +inf in
sparse-prefill, -inf in dcp-decode); ``input_sha256``, which must be that of the inputs; of
dcp-decode ``parts``: in what dtype results over parts of the keys stood before they were merged
(float32, bfloat16, or bfloat16 twice: those of ranges of keys, and of ranks).

THEIRS is a bundle of the same call, of which only the result is needed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from compare.bundle.file import FORMATS, BundleError, BundleFile, read_bundle
from compare.protocol.case import Case
from compare.protocol.inputs import Inputs
from compare.protocol.report import Report, Row
from compare.protocol.tensor_file import tensor_bytes, write_bytes
from compare.suites.table import DEFAULT_SUITE, SUITES, parse_case, suite_of
from compare.user.candidate import EMPTY_LSES, LSE_BASES
from compare.user.own_tensors import as_inputs

__all__ = ["BundleError", "compare_files", "save_bundle"]


def compare_files(
    mine: Path | str, theirs: Path | str | None = None, *, profile: str = "calibrated"
) -> Report:
    """Judges the result in `mine` against the oracle and, where given, the one in `theirs`.

    profile: calibrated, flashmla or both. Raises BundleError for files that aren't bundles of one
    call.
    """
    from compare.houses.torch_backend import torch_device
    from compare.report.environment import environment

    started = time.perf_counter()
    file = read_bundle(Path(mine), DEFAULT_SUITE)
    inputs = file.inputs()
    candidate = file.result()
    reference = None if theirs is None else _reference(Path(theirs), file, inputs)
    suite = SUITES[file.suite]
    try:
        evidence = suite.evidence(inputs, partial(torch_device, None))
        verdict = suite.judge(inputs, candidate, reference, profile=profile, evidence=evidence)
    except ValueError as error:  # values that no implementation may be given
        raise BundleError(f"{mine}: {error}") from error
    row = Row(
        case=str(inputs.case) if inputs.case else f"{file.suite} of {mine}",
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
    path: Path | str,
    inputs: Inputs | Mapping[str, Any] | Case | str,
    result: Any,
    *,
    suite: str | None = None,
    lse: str = "natural",
    empty_lse: str | None = None,
) -> None:
    """Writes one call as a bundle: inputs that came from a case as its line, others as tensors.

    inputs and result: as `compare.judge` takes them for the suite: a mapping of the arguments, a
    case or its line, and (out, max_logits, lse), of decode (out, lse), a mapping or an object with
    these names. Results without a max_logits, and a result of this package with rows of out only,
    are taken as they are; notes aren't kept. suite: sparse-prefill or dcp-decode; None: that of the
    inputs, and of a mapping sparse-prefill. lse, empty_lse: what the result's lse is, written down
    for whoever reads the bundle; lse itself is kept as it is.

    ValueError for arguments that a bundle can't hold, TypeError for what isn't a result.
    """
    suite = suite or _suite_of(inputs)
    if suite not in FORMATS:
        raise ValueError(f"suite: {suite}; bundles hold {' or '.join(FORMATS)}")
    signature, form = SUITES[suite].signature, FORMATS[suite]
    call = as_inputs(suite, inputs)
    result = signature.result(result, "result", call)
    for word, said, accepted in (("lse", lse, LSE_BASES), ("empty_lse", empty_lse, EMPTY_LSES)):
        if said not in (None, *accepted):
            raise ValueError(f"{word}: {said!r}; accepted are {' and '.join(accepted)}")
    metadata = {"suite": suite, "input_sha256": call.sha256()}
    metadata |= {} if lse == "natural" else {"lse": lse}
    metadata |= {} if empty_lse is None else {"empty_lse": empty_lse}
    metadata |= _texts(form.result_words, result)
    tensors = {name: getattr(result, name) for name in signature.results}
    if call.case is not None:
        metadata["case"] = str(call.case)
    elif reason := form.unkept(call):
        raise ValueError(reason)
    else:
        metadata |= _texts(form.words, call)
        tensors |= {name: getattr(call, name) for name in signature.tensors}
    held = {name: array for name, array in tensors.items() if array is not None}
    write_bytes(Path(path), tensor_bytes(held, metadata))


def _reference(path: Path, mine: BundleFile, inputs: Inputs) -> Any:
    """The result in THEIRS; whatever it says about its inputs must be MINE's."""
    file = read_bundle(path, mine.suite)
    if file.suite != mine.suite:
        raise BundleError(f"{path} is of {file.suite}; {mine.path} is of {mine.suite}")
    hashed = file.inputs().sha256() if file.says_inputs else file.input_sha256
    if hashed not in (None, inputs.sha256()):
        raise BundleError(
            f"{path} is another call: its inputs have SHA-256 {hashed[:12]} and the other file's "
            f"{inputs.sha256()[:12]}"
        )
    return file.result()


def _suite_of(inputs: Inputs | Mapping[str, Any] | Case | str) -> str:
    if isinstance(inputs, str):
        inputs = parse_case(inputs)
    if isinstance(inputs, Case):
        return inputs.suite
    return DEFAULT_SUITE if isinstance(inputs, Mapping) else suite_of(inputs).name


def _texts(words: Mapping[str, Any], of: Any) -> dict[str, str]:
    """These fields of an object as metadata; None is left out."""
    values = {name: getattr(of, name) for name in words}
    return {n: words[n].key.show(value) for n, value in values.items() if value is not None}
