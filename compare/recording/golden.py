"""Recorded results as implementations: `golden:DEVICE/KERNEL` answers from goldens/DEVICE/KERNEL.

Every hash is checked on the way: the manifest's seal, each tensor of the file, and the inputs,
which this checkout's generator must have made exactly as the recording one did. What doesn't match
is a DamagedGolden, never a quiet result.
"""

from __future__ import annotations

import functools

from compare.goldens.files import known_folder, read_entry
from compare.goldens.format import (
    ENTRIES,
    MANIFEST,
    DamagedGolden,
    DecodeEntry,
    FileEntry,
    Manifest,
    PlanEntry,
    StagesEntry,
    TensorEntry,
    V4PrefillEntry,
    read_manifest,
)
from compare.judging.attention_call import SparsePrefillResult
from compare.judging.plans import PlanChunk, PlanResult, PrefillPlanInputs
from compare.protocol.case import Case
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs, Result
from compare.suites.dcp_decode.call import DcpDecodeResult
from compare.suites.v4_prefill.call import V4PrefillResult
from compare.suites.v4_stages.recorded import recorded_result


class GoldenImplementation:
    """The recorded results of one kernel on one device, as something to compare with.

    name: golden:DEVICE/KERNEL, of the first folder of `goldens_folders` that has it. A case that
    runs chunk by chunk is answered whole.
    """

    def __init__(self, name: str) -> None:
        self.folder = known_folder(name)
        self._name = name
        self.name = f"golden:{name}"

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What is recorded. Raises DamagedGolden."""
        return read_manifest(self.folder)

    @functools.cached_property
    def suites(self) -> frozenset[str]:
        """The suite that the manifest names; of a manifest that can't be read, all: run() says
        why.
        """
        try:
            return frozenset({self.manifest.suite})
        except DamagedGolden:
            return frozenset(ENTRIES)

    def supports(self, case: Case) -> str | None:
        """None, or that there is no result of this case (None for a damaged manifest: run() says
        so).
        """
        try:
            entry = self.manifest.entry(str(case))
        except DamagedGolden:
            return None
        return None if entry else f"no result of this case is recorded in {self._name}"

    def run(self, inputs: Inputs) -> Result:
        """The recorded result. Raises Unsupported where there is none, DamagedGolden where a hash
        differs.
        """
        case = inputs.case
        entry = None if case is None else self.manifest.entry(str(case))
        if entry is None:
            raise Unsupported(f"no result of {case or 'these inputs'} is recorded in {self._name}")
        if isinstance(entry, PlanEntry):
            assert isinstance(inputs, PrefillPlanInputs)
            return _plan(entry, inputs, self.manifest.source)
        self._check_inputs(entry, inputs)
        made = f"recorded on {entry.gpu} from {entry.build['name']} {entry.build['version']}"
        notes = (made, *entry.notes)
        if isinstance(entry, StagesEntry):
            return recorded_result(self.folder, entry, inputs, notes)
        assert isinstance(entry, TensorEntry)
        tensors = read_entry(self.folder, entry, entry.names)
        if isinstance(entry, DecodeEntry):
            return DcpDecodeResult(**tensors, parts=entry.parts, notes=notes)
        if isinstance(entry, V4PrefillEntry):
            return V4PrefillResult(**tensors, parts=entry.parts, notes=notes)  # pyright: ignore[reportArgumentType]
        return SparsePrefillResult(**tensors, notes=notes)

    def _check_inputs(self, entry: FileEntry, inputs: Inputs) -> None:
        from compare.generate.streams import GENERATOR_VERSION

        if entry.generator_version not in ("", GENERATOR_VERSION):
            raise DamagedGolden(
                f"{self.folder / MANIFEST} recorded {entry.case} from inputs of generator version "
                f"{entry.generator_version} and this one has version {GENERATOR_VERSION}: "
                "record the case again"
            )
        found = inputs.sha256()
        if found != entry.input_sha256:
            raise DamagedGolden(
                f"{self.folder / MANIFEST} recorded {entry.case} from inputs with SHA-256 "
                f"{entry.input_sha256[:12]} and these have {found[:12]}: it isn't the same case"
            )


def _plan(entry: PlanEntry, inputs: PrefillPlanInputs, source: str) -> PlanResult:
    first = [0]
    for tokens in inputs.query_lens:
        first.append(first[-1] + tokens)
    chunks = tuple(
        PlanChunk(
            start=start,
            end=end,
            compressed_rows=compressed,
            workspace_rows=rows,
            query_start=first[start],
            query_end=first[end],
        )
        for start, end, compressed, rows in entry.plan
    )
    return PlanResult(chunks=chunks, notes=(source,))
