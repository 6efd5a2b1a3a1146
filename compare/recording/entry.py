"""What is kept of one result: the entry of its manifest, and the content of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compare.generate.streams import GENERATOR_VERSION
from compare.goldens.format import (
    DecodeEntry,
    FileEntry,
    PrefillEntry,
    StagesEntry,
    TensorRecord,
    V4PrefillEntry,
    array_sha256,
    file_name,
)
from compare.judging.attention_call import SparsePrefillResult
from compare.protocol.case import Case
from compare.protocol.tensor_file import tensor_bytes
from compare.recording.rows import RowInputs, choose_rows
from compare.suites.dcp_decode.call import DcpDecodeResult
from compare.suites.v4_prefill.call import V4PrefillResult
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.recorded import stored_call

RowResult = SparsePrefillResult | DcpDecodeResult | V4PrefillResult
RecordedInputs = RowInputs | V4StagesInputs
RecordedResult = RowResult | V4StagesResult


def entry_of(
    case: Case, inputs: RecordedInputs, result: RecordedResult, facts: Mapping[str, Any]
) -> tuple[FileEntry, bytes]:
    """The entry and the file's content of one result, which has the whole of out.

    facts: build, gpu, driver, torch, cuda and revision.
    """
    if isinstance(inputs, V4StagesInputs):
        assert isinstance(result, V4StagesResult)
        return stages_entry(str(case), inputs, result, facts)
    assert isinstance(result, RowResult)
    total = result.lse.size
    rows, special = choose_rows(inputs, result.lse, getattr(case, "seed", 0))
    tensors = {
        "lse": np.asarray(result.lse),
        "out": result.out.reshape(total, 512)[rows],
        "out_rows": rows,
    }
    if not isinstance(result, DcpDecodeResult) and result.max_logits is not None:
        tensors = {"max_logits": np.asarray(result.max_logits), **tensors}
    return _finished(
        _ENTRIES[type(result)],
        str(case),
        inputs,
        tensors,
        {
            **facts,
            "out_sha256": array_sha256(result.out),
            "rows": {"kept": len(rows), "special": special, "of": total},
            "notes": result.notes,
            **({} if isinstance(result, SparsePrefillResult) else {"parts": result.parts}),
        },
    )


def stages_entry(
    line: str,
    inputs: V4StagesInputs,
    result: V4StagesResult,
    facts: Mapping[str, Any],
    *,
    with_inputs: bool = False,
) -> tuple[FileEntry, bytes]:
    """The same of a single stage; with_inputs: its inputs are kept too, since the line doesn't make
    them.
    """
    tensors, numbers = stored_call(inputs, result, with_inputs=with_inputs)
    more = {**facts, "stage": inputs.stage, "numbers": numbers, "notes": result.notes}
    if with_inputs:
        more["generator_version"] = ""
    return _finished(StagesEntry, line, inputs, tensors, more)


def _finished(
    kind: type[FileEntry],
    line: str,
    inputs: RecordedInputs,
    tensors: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
) -> tuple[FileEntry, bytes]:
    common = {
        "case": line,
        "file": file_name(line),
        "generator_version": GENERATOR_VERSION,
        "input_sha256": inputs.sha256(),
        "tensors": {name: TensorRecord.of(array) for name, array in tensors.items()},
    }
    return kind(**{**common, **fields}), tensor_bytes(tensors, {"case": line})


_ENTRIES: dict[type, type[FileEntry]] = {
    SparsePrefillResult: PrefillEntry,
    DcpDecodeResult: DecodeEntry,
    V4PrefillResult: V4PrefillEntry,
}
