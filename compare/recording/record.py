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

from compare.goldens.format import (
    MANIFEST,
    DecodeEntry,
    Entry,
    FileEntry,
    Manifest,
    PrefillEntry,
    StagesEntry,
    V4PrefillEntry,
    read_manifest,
    write_manifest,
)
from compare.judging.attention_call import SparsePrefillResult
from compare.protocol.case import Case
from compare.protocol.implementation import Implementation, Unsupported
from compare.protocol.revision import REVISION_VARIABLE, checkout
from compare.protocol.tensor_file import write_bytes
from compare.protocol.verdict import Status
from compare.recording.entry import RecordedInputs, RecordedResult, entry_of
from compare.suites.sparse_prefill.case import SparsePrefillCase
from compare.suites.table import SUITES
from compare.suites.v4_stages.call import V4StagesResult

LARGEST_CASE = 1_000_000  # bytes
LARGEST_FOLDER = {
    PrefillEntry.suite: 6_000_000,
    DecodeEntry.suite: 2_150_000,
    V4PrefillEntry.suite: 2_000_000,
    StagesEntry.suite: 1_000_000,
}
_ROOT = Path(__file__).parents[2]


class RecordingRefused(RuntimeError):
    """Something can't be recorded: the tree is dirty, or the cases that the message lists with
    their reasons. recording: what was recorded all the same."""

    def __init__(self, message: str, recording: Recording | None = None) -> None:
        super().__init__(message)
        self.recording = recording or Recording()


class KernelNotHere(RecordingRefused):
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
    """Records what an implementation gives for each case of a suite with tensors, under goldens'
    format.

    implementation: a name of the registry, or the implementation itself. out_dir: the folder
    DEVICE/KERNEL; its last two parts become the name. A case whose result is there already, from
    the same build and inputs, is kept unless `force`; one that the implementation doesn't serve is
    skipped. Each case is on disk, and in the manifest, before the next one starts: an interrupted
    recording loses nothing and is taken up by the same call. `progress` gets a line for each case.

    Raises KernelNotHere where a named implementation can't run on this machine. Raises
    RecordingRefused before anything runs where the git tree is dirty (unless `allow_dirty`:
    the revision then says so) or unknown (no git here and no MLA_CROSSCHECK_REVISION), or where the
    cases are of several suites or not of the folder's; and at the end, when the other cases are
    recorded, for cases that the implementation couldn't run, whose result fails the judge, or that
    would make the folder too large, and where every case was skipped. Raises DamagedGolden for a
    manifest that can't be read.
    """
    from compare.suites.table import parse_case

    folder = Path(out_dir)
    say = progress or (lambda line: None)
    revision = code_revision(folder, allow_dirty=allow_dirty)
    kernel = _found(implementation, device)
    facts = _facts(kernel, revision)
    recording = Recording()
    todo = [parse_case(case) if isinstance(case, str) else case for case in cases]
    manifest = _manifest(folder, facts, {case.suite for case in todo})
    for number, case in enumerate(todo, 1):
        line = str(case)
        try:
            inputs = _inputs(case)
            old = manifest.entry(line)
            if not force and _still_valid(folder, old, inputs, facts["build"]):
                recording = dataclasses.replace(recording, kept=(*recording.kept, line))
                say(f"{number}/{len(todo)} kept {line}")
                continue
            entry, content = _record_case(kernel, case, inputs, facts)
            _check_size(folder, entry, len(content))
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


def _found(implementation: str | Implementation, device: str | None) -> Implementation:
    if not isinstance(implementation, str):
        return implementation
    from compare.run.registry import find, reason

    if why := reason(implementation, device):
        raise KernelNotHere(f"{implementation} can't run here: {why}")
    return find(implementation, device)


def _inputs(case: Case) -> RecordedInputs:
    from compare.suites.table import make_inputs

    inputs = make_inputs(case)
    assert isinstance(inputs, RecordedInputs)  # _manifest has looked at the suite
    return inputs


def _record_case(
    kernel: Implementation, case: Case, inputs: RecordedInputs, facts: dict[str, Any]
) -> tuple[FileEntry, bytes]:
    """The entry and the file's content of one case."""
    result = _run(kernel, case, inputs)
    _check_verdict(case, inputs, result)
    return entry_of(case, inputs, result, facts)


def _run(kernel: Implementation, case: Case, inputs: RecordedInputs) -> RecordedResult:
    if reason := kernel.supports(case):
        raise _Skipped(reason)
    try:
        result = kernel.run(inputs)
    except Unsupported as reason:
        raise _Skipped(str(reason)) from reason
    except Exception as error:  # an implementation may fail in any way; the other cases go on
        raise _Refused(f"it raised {type(error).__name__}: {error}") from error
    assert isinstance(result, RecordedResult)
    if isinstance(result, V4StagesResult):
        return result
    if isinstance(result, SparsePrefillResult) and result.max_logits is None:
        raise _Refused("a recording needs max_logits and the whole of out")
    if result.out_rows is not None:
        raise _Refused("a recording needs the whole of out")
    return result


def _check_verdict(case: Case, inputs: RecordedInputs, result: RecordedResult) -> None:
    # FlashMLA's tolerances are absolute numbers for the size of its own data: with values ten times
    # as large, the rounding of a right kernel is outside them where an element is near zero.
    own = isinstance(case, SparsePrefillCase) and case.data == "flashmla"
    profile = "both" if own else "calibrated"
    verdict = SUITES[case.suite].judge(inputs, result, None, profile=profile)
    if verdict.status is not Status.PASS:
        raise _Refused(f"the judge says {verdict.status.value}: {verdict.reason}")


def _check_size(folder: Path, entry: FileEntry, size: int) -> None:
    if size > LARGEST_CASE:
        raise _Refused(f"its {size:,} bytes exceed the {LARGEST_CASE:,} that a case may have")
    others = sum(path.stat().st_size for path in folder.glob("*") if path.name != entry.file)
    largest = LARGEST_FOLDER[entry.suite]
    if others + size > largest:
        raise _Refused(
            f"its {size:,} bytes would make {folder.name} larger than {largest:,} in all"
        )


def _still_valid(
    folder: Path, entry: Entry | None, inputs: RecordedInputs, build: dict[str, str]
) -> bool:
    return (
        isinstance(entry, FileEntry)
        and entry.build == build
        and (folder / entry.file).is_file()
        and entry.input_sha256 == inputs.sha256()
    )


def _manifest(folder: Path, facts: dict[str, Any], suites: set[str]) -> Manifest:
    """The manifest of the folder; a new one is of the cases' suite."""
    found = read_manifest(folder) if (folder / MANIFEST).is_file() else None
    suite = found.suite if found is not None else min(suites, default=PrefillEntry.suite)
    if suite not in LARGEST_FOLDER or suites - {suite}:
        raise RecordingRefused(
            f"{folder} can't hold results of {' and '.join(sorted(suites | {suite}))}: a folder "
            f"has those of one suite, {' or '.join(LARGEST_FOLDER)}"
        )
    if found is not None:
        return found
    build = facts["build"]
    return Manifest(
        name="/".join(folder.resolve().parts[-2:]),
        suite=suite,
        source=f"{build['name']} {build['version']} on {facts['gpu']}",
    )


def _facts(implementation: Implementation, revision: str) -> dict[str, Any]:
    """What every entry of a recording has in common."""
    from compare.run.environment import environment

    found = environment()
    return {
        "build": _build(implementation),
        "gpu": found.get("gpu", "none (CPU)"),
        "driver": found.get("driver", "none"),
        "torch": found.get("torch", "none"),
        "cuda": found.get("cuda", "none"),
        "revision": revision,
    }


def _build(implementation: Implementation) -> dict[str, str]:
    """Name and version of the kernel; this project's own implementations have its version."""
    name = implementation.name
    if name in ("flash_mla", "flash_mla-fp8"):
        from torch_ref.cuda import flash_mla_adapter, flash_mla_sparse_decode

        adapter = flash_mla_adapter if name == "flash_mla" else flash_mla_sparse_decode
        if build := adapter.find_build():
            return {"name": build.name, "version": build.version}
    if name.startswith("flashinfer-"):
        from torch_ref.cuda.flashinfer_adapter import version as flashinfer_version

        return {"name": "flashinfer-python", "version": flashinfer_version()}
    if name == "vllm":
        from torch_ref.cuda.vllm_adapter import version as vllm_version

        return {"name": name, "version": vllm_version() or "unknown"}
    from compare.protocol.version import version

    return {"name": name, "version": version()}
