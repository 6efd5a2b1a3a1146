"""The format of recorded results: goldens/DEVICE/KERNEL/manifest.json and a safetensors file a
case.

A manifest holds what was recorded, by what and from which inputs; inputs themselves aren't stored,
since a case makes the same bytes on every machine (but for calls of a single stage that were
recorded elsewhere). Its entries stand one on a line. Each is
sealed: its `sha256` is over the entry's own content, so that a change by hand shows; the manifest's
`seal` is over its head and the seals of all entries, so that a lost one shows too.

A case of sparse prefill or of the whole V4 prefill path has the tensors max_logits and lse of every
row (float32 [T, H]) and `out` (bfloat16 [R, 512]) of the rows `out_rows` (int32 [R], token * H +
head); one of dcp-decode has the same but max_logits. One of a single stage has the stage's arrays
whole, see golden_stages.py. A case of prefill-plan has its rows (start, end, N, M) in the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from compare.protocol.tensor_file import write_bytes

FORMAT = 1
MANIFEST = "manifest.json"
FOLDER_VARIABLE = "MLA_CROSSCHECK_GOLDENS"


class DamagedGolden(RuntimeError):
    """A recorded result isn't what its manifest or this checkout says; the message is one sentence
    with the file and what differs. The run ends with exit status 3."""


class UnknownGolden(LookupError):
    """No results are recorded under that name, or not of that call; the message says which there
    are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One tensor of a case's file. sha256: of its dense little-endian bytes."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str

    @classmethod
    def of(cls, array: np.ndarray) -> TensorRecord:
        return cls(shape=tuple(array.shape), dtype=array.dtype.name, sha256=array_sha256(array))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One recorded case with a file of tensors. generator_version: of the inputs' generator.
    build: the kernel's distribution and version."""

    suite: ClassVar[str]

    case: str
    file: str
    generator_version: str
    build: Mapping[str, str]
    gpu: str
    driver: str
    torch: str
    cuda: str
    revision: str
    input_sha256: str
    tensors: Mapping[str, TensorRecord]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> Self:
        tensors = {
            name: TensorRecord(**{**record, "shape": tuple(record["shape"])})
            for name, record in words.pop("tensors").items()
        }
        return cls(**{**words, "notes": tuple(words["notes"])}, tensors=tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry(FileEntry):
    """One recorded case of attention; a subclass says of which suite, and which tensors.

    rows: how many (token, head) rows `out` holds, of how many, and how many of those held are
    special. out_sha256: of the whole out, which isn't stored.
    """

    maxima: ClassVar[bool] = True
    """Whether a case has max_logits."""

    out_sha256: str
    rows: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that a case's file must hold."""
        return ("lse", *(["max_logits"] if self.maxima else []), "out", "out_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillEntry(TensorEntry):
    """One recorded case of sparse prefill."""

    suite: ClassVar[str] = "sparse-prefill"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeEntry(TensorEntry):
    """One recorded case of DCP decode. parts: as in DcpDecodeResult."""

    suite: ClassVar[str] = "dcp-decode"
    maxima: ClassVar[bool] = False

    parts: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4PrefillEntry(TensorEntry):
    """One recorded case of the whole V4 prefill path; max_logits of a kernel that returns them.
    parts: as in V4PrefillResult."""

    suite: ClassVar[str] = "v4-prefill"

    parts: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in super().names if n != "max_logits" or n in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagesEntry(FileEntry):
    """One recorded call of a single stage. numbers: those of its arguments that aren't arrays, of
    a call that was recorded with its inputs; generator_version is empty then."""

    suite: ClassVar[str] = "v4-stages"

    stage: str
    numbers: Mapping[str, int | str | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One recorded plan: rows (start, end, N, M), requests [start, end) with N compressed rows of
    M.
    """

    suite: ClassVar[str] = "prefill-plan"

    case: str
    plan: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> PlanEntry:
        plan = tuple((start, end, n, m) for start, end, n, m in words["plan"])
        return cls(**{**words, "plan": plan})


Entry = FileEntry | PlanEntry
ENTRIES: dict[str, type[FileEntry] | type[PlanEntry]] = {
    entry.suite: entry
    for entry in (PrefillEntry, DecodeEntry, V4PrefillEntry, StagesEntry, PlanEntry)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of recorded results holds. name: DEVICE/KERNEL. source: who made them, a
    sentence.
    """

    name: str
    suite: str
    source: str
    entries: tuple[Entry, ...] = ()

    def entry(self, case: str) -> Entry | None:
        """The entry of a case line."""
        return next((entry for entry in self.entries if entry.case == case), None)

    def with_entry(self, entry: Entry) -> Manifest:
        """The same with `entry` in the place of an older one of its case, or at the end."""
        others = {e.case: e for e in self.entries} | {entry.case: entry}
        return dataclasses.replace(self, entries=tuple(others.values()))


def array_sha256(array: np.ndarray) -> str:
    """SHA-256 of an array's dense bytes, in blocks of its first axis."""
    digest = hashlib.sha256()
    for block in range(0, len(array), 256):
        digest.update(np.ascontiguousarray(array[block : block + 256]).view(np.uint8))
    return digest.hexdigest()


def goldens_folders() -> tuple[Path, ...]:
    """Where recorded results are looked for, in this order: $MLA_CROSSCHECK_GOLDENS, the folder
    that a wheel has inside this package, the one that a checkout has beside it."""
    named = os.environ.get(FOLDER_VARIABLE)
    package = Path(__file__).parents[1]
    own = (Path(named),) if named else ()
    return (*own, package / "_goldens", package.parent / "goldens")


def find_golden(name: str) -> Path | None:
    """The folder of DEVICE/KERNEL: the first that there is, with or without its manifest, which is
    damage; None where there is none."""
    folders = (root / name for root in goldens_folders())
    return next((folder for folder in folders if folder.is_dir()), None)


def file_name(case: str) -> str:
    """The file of a case: named after its line, since a line may be longer than a name can be."""
    return f"{hashlib.sha256(case.encode()).hexdigest()[:16]}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest, one entry a line, in the place of the one that is there."""
    head = {"format": FORMAT, "name": manifest.name, "suite": manifest.suite}
    head["source"] = manifest.source
    entries = [_sealed(json.loads(json.dumps(dataclasses.asdict(e)))) for e in manifest.entries]
    head["seal"] = _seal(head, entries)
    lines = ",\n".join(map(json.dumps, entries))
    text = json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n"
    write_bytes(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, its seals checked; DamagedGolden says what is wrong with
    it.
    """
    path = folder / MANIFEST
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        found = words["format"]
        if found != FORMAT:
            raise DamagedGolden(f"{path} has format {found!r}; this version reads {FORMAT}")
        seal = _seal(words, words["entries"])
        entries = tuple(_entry(path, words["suite"], entry) for entry in words["entries"])
        if words["seal"] != seal:
            raise DamagedGolden(
                f"{path} is damaged: its head and its {len(entries)} entries have the seal "
                f"{seal[:12]} and it says {str(words['seal'])[:12]}: one was lost, added or changed"
            )
        return Manifest(
            name=words["name"], suite=words["suite"], source=words["source"], entries=entries
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedGolden(
            f"{path} can't be read as a manifest ({type(error).__name__}: {error})"
        ) from error


def _entry(path: Path, suite: str, words: dict[str, Any]) -> Entry:
    seal = words.pop("sha256")
    expected = _sealed(words)["sha256"]
    if seal != expected:
        raise DamagedGolden(
            f"{path} is damaged: the entry of {words.get('case')} has SHA-256 {expected[:12]} "
            f"and its seal says {str(seal)[:12]}"
        )
    return ENTRIES[suite].from_json(words)


def _seal(head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Over a manifest's head and the seals of its entries, in their order."""
    named = {name: head[name] for name in ("format", "name", "suite", "source")}
    return _sealed({**named, "entries": [entry["sha256"] for entry in entries]})["sha256"]


def _sealed(words: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps(words, sort_keys=True, separators=(",", ":"))
    return {**words, "sha256": hashlib.sha256(content.encode()).hexdigest()}
