"""The format of recorded results: goldens/DEVICE/KERNEL/manifest.json, and for each case a file of
tensors, which packing.py describes.

A manifest holds what was recorded, by what and from which inputs; inputs themselves aren't stored,
since a case makes the same bytes on every machine (but for calls of a single stage that were
recorded elsewhere). Its entries stand one on a line. Each names the SHA-256 of every tensor of its
file, and the manifest's `seal` is over all else that it says, so that a change by hand, a lost
entry and a changed tensor show.

Which tensors a case has, and which facts of its suite's own stand beside them in its entry, each
suite says (`Suite.records`). A case of attention has the statistics of every row (float32 [T, H])
and `out` (bfloat16 [R, 512]) of the rows `out_rows` (int32 [R], token * H + head). A plan has no
file: it stands in the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compare.goldens.packing import ENDING
from compare.protocol.tensor_file import write_bytes

FORMAT = 2
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
class Entry:
    """One recorded case. facts: what its suite keeps beside the tensors.

    file, tensors: none of a case that is kept in the manifest alone. input_sha256: of the inputs;
    generator_version: of what made them, empty where they are stored too. build: the kernel's
    distribution and version; gpu, driver, torch, cuda: where it ran; revision: of this project;
    none of these where only the manifest's source says who made the results.
    """

    case: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    file: str | None = None
    tensors: Mapping[str, TensorRecord] = dataclasses.field(default_factory=dict)
    input_sha256: str | None = None
    generator_version: str = ""
    build: Mapping[str, str] | None = None
    gpu: str | None = None
    driver: str | None = None
    torch: str | None = None
    cuda: str | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, words: dict[str, Any]) -> Entry:
        """The entry that to_json wrote."""
        tensors = {
            name: TensorRecord(**{**record, "shape": tuple(record["shape"])})
            for name, record in words.get("tensors", {}).items()
        }
        return cls(**{**words, "tensors": tensors, "notes": tuple(words.get("notes", ()))})

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON, without the fields that have their default."""
        words = json.loads(json.dumps(dataclasses.asdict(self)))
        return {name: value for name, value in words.items() if value not in (None, "", [], {})}


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
    return f"{hashlib.sha256(case.encode()).hexdigest()[:16]}{ENDING}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a manifest, one entry a line, in the place of the one that is there."""
    head = {"format": FORMAT, "name": manifest.name, "suite": manifest.suite}
    head["source"] = manifest.source
    entries = [entry.to_json() for entry in manifest.entries]
    head["seal"] = _seal({**head, "entries": entries})
    lines = ",\n".join(map(json.dumps, entries))
    text = json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n"
    write_bytes(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, its seal checked; DamagedGolden says what is wrong with it."""
    path = folder / MANIFEST
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
        version = words["format"]
        if version != FORMAT:
            raise DamagedGolden(f"{path} has format {version!r}; this version reads {FORMAT}")
        said, seal = words["seal"], _seal(words)
        if said != seal:
            raise DamagedGolden(
                f"{path} is damaged: its content has the seal {seal[:12]} and it says "
                f"{str(said)[:12]}: its head or an entry was changed, lost or added"
            )
        return Manifest(
            name=words["name"],
            suite=words["suite"],
            source=words["source"],
            entries=tuple(map(Entry.from_json, words["entries"])),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedGolden(
            f"{path} can't be read as a manifest ({type(error).__name__}: {error})"
        ) from error


def _seal(words: Mapping[str, Any]) -> str:
    """SHA-256 of all that a manifest says but the seal itself."""
    named = {name: value for name, value in words.items() if name != "seal"}
    content = json.dumps(named, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
