"""Recorded results as implementations: `golden:DEVICE/KERNEL` answers from goldens/DEVICE/KERNEL.

Every hash is checked on the way: the manifest's seal, each tensor of the file, and the inputs,
which this checkout's generator must have made exactly as the recording one did. What doesn't match
is a DamagedGolden, never a quiet result.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from compare.generate import streams
from compare.goldens.files import known_folder, read_entry
from compare.goldens.format import MANIFEST, DamagedGolden, Entry, Manifest, read_manifest
from compare.protocol.case import Case
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Incomplete, Stored
from compare.protocol.suite import Suite


class GoldenImplementation:
    """The recorded results of one kernel on one device, as something to compare with.

    name: golden:DEVICE/KERNEL, of the first folder of `goldens_folders` that has it. suites: those
    whose results may be recorded. A case that runs chunk by chunk is answered whole.
    """

    def __init__(self, name: str, suites: Mapping[str, Suite]) -> None:
        self.folder = known_folder(name)
        self._name = name
        self._recorded = {n: suite.records for n, suite in suites.items() if suite.records}
        self.name = f"golden:{name}"

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What is recorded. Raises DamagedGolden."""
        manifest = read_manifest(self.folder)
        if manifest.suite not in self._recorded:
            raise DamagedGolden(
                f"{self.folder / MANIFEST} has results of {manifest.suite}; this version reads "
                f"those of {', '.join(self._recorded)}"
            )
        return manifest

    @functools.cached_property
    def suites(self) -> frozenset[str]:
        """The suite that the manifest names; of a manifest that can't be read, all: run() says
        why.
        """
        try:
            return frozenset({self.manifest.suite})
        except DamagedGolden:
            return frozenset(self._recorded)

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
        self._check_inputs(entry, inputs)
        made = self.manifest.source
        if entry.build is not None:
            made = f"recorded on {entry.gpu} from {entry.build['name']} {entry.build['version']}"
        stored = Stored(tensors=read_entry(self.folder, entry), facts=entry.facts)
        try:
            records = self._recorded[self.manifest.suite]
            return records.restore(inputs, stored, (made, *entry.notes))
        except Incomplete as error:
            raise DamagedGolden(
                f"{self.folder / MANIFEST} is damaged: the entry of {entry.case} has "
                f"{', '.join((*entry.tensors, *entry.facts))}; {error}"
            ) from error

    def _check_inputs(self, entry: Entry, inputs: Inputs) -> None:
        if entry.input_sha256 is None:
            return
        if entry.generator_version not in ("", streams.GENERATOR_VERSION):
            raise DamagedGolden(
                f"{self.folder / MANIFEST} recorded {entry.case} from inputs of generator version "
                f"{entry.generator_version} and this one has version {streams.GENERATOR_VERSION}: "
                "record the case again"
            )
        found = inputs.sha256()
        if found != entry.input_sha256:
            raise DamagedGolden(
                f"{self.folder / MANIFEST} recorded {entry.case} from inputs with SHA-256 "
                f"{entry.input_sha256[:12]} and these have {found[:12]}: it isn't the same case"
            )
