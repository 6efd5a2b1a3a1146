"""Recording results, so that a machine without the kernel can be compared with it.

A result is kept only where it passes the judge against the oracle (on data of FlashMLA's own tests
under both profiles), and only from a clean tree, so that `revision` in the manifest is the code
that made the inputs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from compare._revision import REVISION_VARIABLE, checkout
from compare._version import version
from compare.goldens.format import MANIFEST, Entry, Manifest, read_manifest, write_manifest
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation, Unsupported, distribution
from compare.protocol.inputs import Inputs, Result
from compare.protocol.records import Incomplete, Records
from compare.protocol.suite import Suite
from compare.protocol.tensor_file import write_bytes
from compare.recording.entry import entry_of
from compare.report.environment import environment
from compare.run import registry
from compare.suites.table import SUITES, make_inputs, parse_case

LARGEST_CASE = 1_000_000  # bytes
_ROOT = Path(__file__).parents[2]


class RecordingRefused(RuntimeError):
    """Something can't be recorded: the tree is dirty, or the cases that the message lists with
    their reasons. recording: what was recorded all the same."""

    def __init__(self, message: str, recording: Recording | None = None) -> None:
        super().__init__(message)
        self.recording = recording or Recording()


class KernelNotAvailable(RecordingRefused):
    """The implementation can't run on this machine at all; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one call of record did, by case line; refused, and skipped since the kernel doesn't
    serve them: with the reason."""

    recorded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)


def record(
    implementation: str | Implementation,
    cases: Iterable[Case | str],
    out_dir: Path | str,
    *,
    progress: Callable[[str], None] | None = None,
    allow_dirty: bool = False,
    device: str | None = None,
    force: bool = False,
) -> Recording:
    """Records what an implementation gives for each case of a suite, under goldens' format.

    implementation: a name of the registry, or the implementation itself. out_dir: the folder
    DEVICE/KERNEL; its last two parts become the name. A case whose result is there already, from
    the same build and inputs, is kept unless `force`; one that the implementation doesn't serve is
    skipped. Each case is on disk, and in the manifest, before the next one starts: an interrupted
    recording loses nothing and is taken up by the same call. `progress` gets a line for each case.

    Raises KernelNotAvailable where a named implementation can't run on this machine. Raises
    RecordingRefused before anything runs where the git tree is dirty (unless `allow_dirty`:
    the revision then says so) or unknown (no git here and no MLA_CROSSCHECK_REVISION), or where the
    cases are of several suites or not of the folder's; and at the end, when the other cases are
    recorded, for cases that the implementation couldn't run, whose result fails the judge, or that
    would make the folder too large, and where every case was skipped. Raises DamagedGolden for a
    manifest that can't be read.
    """
    folder = Path(out_dir)
    say = progress or (lambda line: None)
    revision = code_revision(folder, allow_dirty=allow_dirty)
    kernel = _runnable(implementation, device)
    recording = Recording()
    todo = [parse_case(case) if isinstance(case, str) else case for case in cases]
    if not todo:
        return recording
    suite = _suite(folder, {case.suite for case in todo})
    machine = _machine(kernel, suite, revision)
    manifest = _manifest(folder, suite, machine)
    for number, case in enumerate(todo, 1):
        line = str(case)
        try:
            inputs = make_inputs(case)
            old = manifest.entry(line)
            if not force and _still_valid(folder, old, inputs, machine["build"]):
                recording = dataclasses.replace(recording, kept=(*recording.kept, line))
                say(f"{number}/{len(todo)} kept {line}")
                continue
            entry, content = _record_case(kernel, suite, case, inputs, machine)
            _check_size(folder, _records(suite), entry, len(content))
        except _Skipped as reason:
            skipped = {**recording.skipped, line: str(reason)}
            recording = dataclasses.replace(recording, skipped=skipped)
            say(f"{number}/{len(todo)} skipped {line}: {reason}")
            continue
        except _Refused as refusal:
            refused = {**recording.refused, line: str(refusal)}
            recording = dataclasses.replace(recording, refused=refused)
            say(f"{number}/{len(todo)} REFUSED {line}: {refusal}")
            continue
        # The tensors first: a manifest never names a file that isn't there.
        if entry.file is not None:
            write_bytes(folder / entry.file, content)
        manifest = manifest.with_entry(entry)
        write_manifest(folder, manifest)
        recording = dataclasses.replace(recording, recorded=(*recording.recorded, line))
        say(f"{number}/{len(todo)} recorded {line} ({len(content):,} bytes)")
    if recording.refused:
        listed = "".join(f"\n  {line}: {why}" for line, why in recording.refused.items())
        raise RecordingRefused(f"not recorded:{listed}", recording)
    if recording.skipped and not (recording.recorded or recording.kept):
        reasons = "; ".join(dict.fromkeys(recording.skipped.values()))
        raise RecordingRefused(f"{kernel.name} serves none of the cases: {reasons}", recording)
    return recording


def code_revision(out_dir: Path, *, allow_dirty: bool = False, root: Path = _ROOT) -> str:
    """The git revision of this code; `out_dir` and what git ignores don't count as changes.

    Where git doesn't know the tree (a copy without its history): what MLA_CROSSCHECK_REVISION says,
    unchecked.
    """
    found = checkout(root)
    if found is None:
        if given := os.environ.get(REVISION_VARIABLE):
            return f"{given} (as given by {REVISION_VARIABLE})"
        raise RecordingRefused(
            f"{root} isn't a git checkout that git can read here, so the revision is unknown; "
            f"set {REVISION_VARIABLE} to it"
        )
    if found.changed is None or found.untracked is None:
        raise RecordingRefused(f"git status failed in {root}: whether the tree is clean is unknown")
    inside = out_dir.resolve()
    files = sorted((*found.changed, *found.untracked))
    changed = [name for name in files if not (root / name).resolve().is_relative_to(inside)]
    if not changed:
        return found.commit
    if not allow_dirty:
        shown = ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if changed[8:] else "")
        raise RecordingRefused(
            f"the tree differs from its commit in {shown}: commit them first, so that the recorded "
            "revision is the code that ran"
        )
    return f"{found.commit}-dirty"


class _Refused(Exception):
    """One case isn't recorded, for this reason."""


class _Skipped(Exception):
    """The kernel doesn't serve the case, for this reason."""


def _runnable(implementation: str | Implementation, device: str | None) -> Implementation:
    if not isinstance(implementation, str):
        return implementation
    if why := registry.reason(implementation, device):
        raise KernelNotAvailable(f"{implementation} can't run here: {why}")
    return registry.find(implementation, device)


def _suite(folder: Path, named: set[str]) -> Suite:
    """The suite of the cases, which is the folder's."""
    held = {read_manifest(folder).suite} if (folder / MANIFEST).is_file() else set()
    names, recorded = sorted(named | held), [n for n, suite in SUITES.items() if suite.records]
    if len(names) != 1 or names[0] not in recorded:
        raise RecordingRefused(
            f"{folder} can't hold results of {' and '.join(names)}: a folder has those of one "
            f"suite, {' or '.join(recorded)}"
        )
    return SUITES[names[0]]


def _records(suite: Suite) -> Records:
    assert suite.records is not None  # _suite has looked
    return suite.records


def _record_case(
    kernel: Implementation, suite: Suite, case: Case, inputs: Inputs, machine: dict[str, Any]
) -> tuple[Entry, bytes]:
    """The entry and the file's content of one case."""
    result = _run(kernel, case, inputs)
    records = _records(suite)
    if reason := records.refusal(suite.judge, inputs, result):
        raise _Refused(reason)
    try:
        stored = records.keep(inputs, result)
    except Incomplete as reason:
        raise _Refused(str(reason)) from reason
    return entry_of(str(case), inputs, stored, result.notes, machine)


def _run(kernel: Implementation, case: Case, inputs: Inputs) -> Result:
    if reason := kernel.supports(case):
        raise _Skipped(reason)
    try:
        return kernel.run(inputs)
    except Unsupported as reason:
        raise _Skipped(str(reason)) from reason
    except Exception as error:  # an implementation may fail in any way; the other cases go on
        raise _Refused(f"it raised {type(error).__name__}: {error}") from error


def _check_size(folder: Path, records: Records, entry: Entry, size: int) -> None:
    if size > LARGEST_CASE:
        raise _Refused(f"its {size:,} bytes exceed the {LARGEST_CASE:,} that a case may have")
    others = sum(path.stat().st_size for path in folder.glob("*") if path.name != entry.file)
    if others + size > records.largest_folder:
        raise _Refused(
            f"its {size:,} bytes would make {folder.name} larger than "
            f"{records.largest_folder:,} in all"
        )


def _still_valid(folder: Path, entry: Entry | None, inputs: Inputs, build: dict[str, str]) -> bool:
    return (
        entry is not None
        and entry.build == build
        and (entry.file is None or (folder / entry.file).is_file())
        and entry.input_sha256 == inputs.sha256()
    )


def _manifest(folder: Path, suite: Suite, machine: dict[str, Any]) -> Manifest:
    """The manifest of the folder, or a new one."""
    if (folder / MANIFEST).is_file():
        return read_manifest(folder)
    return Manifest(
        name="/".join(folder.resolve().parts[-2:]),
        suite=suite.name,
        source=_records(suite).source(machine["build"], machine["gpu"]),
    )


def _machine(kernel: Implementation, suite: Suite, revision: str) -> dict[str, Any]:
    """What every entry of a recording has in common."""
    facts = environment()
    return {
        "build": _build(kernel, suite),
        "gpu": facts.get("gpu", "a CPU"),
        "driver": facts.get("driver", "none"),
        "torch": facts.get("torch", "none"),
        "cuda": facts.get("cuda", "none"),
        "revision": revision,
    }


def _build(kernel: Implementation, suite: Suite) -> dict[str, str]:
    """Name and version of the kernel; this project's own implementations have its version."""
    offer = suite.offer(kernel.name)  # a worker's results are those of what the suite offers
    asked = kernel if offer is None else offer.implementation(None)
    found = distribution(asked)
    return {"name": kernel.name, "version": version()} if found is None else found._asdict()
