"""Recorded results as they lie on disk: which there are, and a case's file read with every hash
checked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compare.goldens.format import (
    MANIFEST,
    DamagedGolden,
    Entry,
    TensorRecord,
    UnknownGolden,
    find_golden,
    goldens_folders,
    read_manifest,
)
from compare.goldens.packing import unpack


def read_entry(folder: Path, entry: Entry) -> dict[str, np.ndarray]:
    """The tensors of an entry, none without a file. DamagedGolden where they aren't those that the
    manifest names, or one of them isn't what was recorded.
    """
    if entry.file is None:
        return {}
    path = folder / entry.file
    try:
        tensors = unpack(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedGolden(f"{path} is damaged: there is no such file") from error
    except (OSError, ValueError) as error:
        raise DamagedGolden(f"{path} is damaged: {error}") from error
    held, named = ", ".join(sorted(tensors)), ", ".join(sorted(entry.tensors))
    if held != named:
        raise DamagedGolden(
            f"{path} is damaged: it holds the tensors {held}, its manifest names {named}"
        )
    for name, record in entry.tensors.items():
        _check_tensor(path, name, tensors[name], record)
    return tensors


def _check_tensor(path: Path, name: str, array: np.ndarray, expected: TensorRecord) -> None:
    is_, should_be = TensorRecord.of(array), expected
    if (is_.dtype, is_.shape) != (should_be.dtype, should_be.shape):
        raise DamagedGolden(
            f"{path} is damaged: {name} is {is_.dtype} {list(is_.shape)} where the manifest says "
            f"{should_be.dtype} {list(should_be.shape)}"
        )
    if is_.sha256 != should_be.sha256:
        raise DamagedGolden(
            f"{path} is damaged: {name} has SHA-256 {is_.sha256[:12]} where the manifest says "
            f"{should_be.sha256[:12]}"
        )


def known_folder(name: str) -> Path:
    """The folder of DEVICE/KERNEL, the first of `goldens_folders` that has it. UnknownGolden."""
    folder = find_golden(name)
    if folder is None:
        names = ", ".join(available()) or "none"
        roots = ", ".join(str(root) for root in goldens_folders() if root.is_dir())
        raise UnknownGolden(
            f"there is no {name}/{MANIFEST} in {roots or 'any folder of recorded results'}; "
            f"results are recorded for: {names}"
        )
    return folder


def available() -> list[str]:
    """The names DEVICE/KERNEL under the folders of recorded results, each once; one without its
    manifest too, which is damaged and mustn't be passed over."""
    return sorted(
        {
            path.relative_to(root).as_posix()
            for root in goldens_folders()
            for path in root.glob("[!.]*/[!.]*/")
            if path.is_dir()
        }
    )


def golden_cases(name: str) -> tuple[str, ...]:
    """The case lines that are recorded under DEVICE/KERNEL. Raises UnknownGolden, DamagedGolden."""
    return tuple(entry.case for entry in read_manifest(known_folder(name)).entries)
