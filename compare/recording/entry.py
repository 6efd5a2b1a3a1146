"""What is kept of one result: the entry of its manifest, and the content of its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compare.generate import streams
from compare.goldens.format import Entry, TensorRecord, file_name
from compare.goldens.packing import pack
from compare.protocol.inputs import Inputs
from compare.protocol.records import Stored


def entry_of(
    line: str, inputs: Inputs, stored: Stored, notes: tuple[str, ...], machine: Mapping[str, Any]
) -> tuple[Entry, bytes]:
    """The entry of a case line, and its file's content, empty without tensors.

    stored: what is kept of the result of `inputs`. notes: the result's. machine: build, gpu,
    driver, torch, cuda and revision.
    """
    tensors = stored.tensors
    entry = Entry(
        case=line,
        file=file_name(line) if tensors else None,
        tensors={name: TensorRecord.of(array) for name, array in tensors.items()},
        facts=stored.facts,
        input_sha256=inputs.sha256(),
        generator_version="" if stored.holds_inputs else streams.GENERATOR_VERSION,
        notes=notes,
        **machine,
    )
    return entry, pack(tensors, line) if tensors else b""
