"""A bundle's file as it was found, and what it says: read once, refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compare.protocol.case import Case, CaseError, word
from compare.protocol.inputs import Inputs
from compare.protocol.signature import FileFormat, Signature, Word, shown
from compare.protocol.tensor_file import read_tensors
from compare.suites.table import SUITES, make_inputs, parse_case
from compare.user.candidate import EMPTY_LSES, LSE_BASES
from compare.user.lse_convention import as_declared
from compare.user.own_tensors import as_inputs

_LSE_WORDS = {"lse": Word(key=word(*LSE_BASES)), "empty_lse": Word(key=word(*EMPTY_LSES))}
FORMATS = {suite.name: form for suite in SUITES.values() if (form := suite.signature.file)}
"""How a bundle of each suite that has bundles is kept."""

# format is the framework's own note of who wrote a file.
_OTHER_WORDS = ("suite", "case", "input_sha256", "format")


class BundleError(ValueError):
    """A bundle can't be understood; the message is a sentence with the file, what was found and
    what is accepted."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BundleFile:
    """One bundle. Every method raises BundleError for what can't be taken."""

    path: Path
    suite: str
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    case: Case | None

    @property
    def signature(self) -> Signature[Any, Any]:
        return SUITES[self.suite].signature

    @property
    def form(self) -> FileFormat:
        return FORMATS[self.suite]

    @property
    def says_inputs(self) -> bool:
        """Whether the call can be had from this file alone."""
        return self.case is not None or any(name in self.tensors for name in self.signature.tensors)

    @property
    def input_sha256(self) -> str | None:
        """The hash of the inputs that the result was computed from, if it is there."""
        return self.metadata.get("input_sha256")

    def inputs(self) -> Inputs:
        """The call: a case's, made here, or the one whose tensors are here."""
        inputs = self._given() if self.case is None else self._made(self.case)
        if self.input_sha256 not in (None, inputs.sha256()):
            raise BundleError(
                f"{self.path} was computed from inputs with SHA-256 {self.input_sha256[:12]} and "
                f"these have {inputs.sha256()[:12]}: they were changed, or another generator made "
                "them"
            )
        return inputs

    def result(self) -> Any:
        """The result, its lse brought from what the metadata declares to the judge's own."""
        missing = [name for name in ("out", "lse") if name not in self.tensors]
        if missing:
            raise BundleError(f"{self.path} lacks the result {missing[0]}; out and lse are needed")
        tensors = {name: self.tensors.get(name) for name in self.signature.results}
        rows = tensors["out_rows"]
        if rows is not None and (rows.dtype != np.int32 or rows.ndim != 1):
            raise BundleError(f"{self.path}: out_rows is {shown(rows)}; accepted is int32 [R]")
        said = self._words(_LSE_WORDS)
        tensors["lse"], notes = as_declared(
            self.tensors["lse"],
            self.signature.empty_lse or "",
            base=said.get("lse", "natural"),
            empty_lse=said.get("empty_lse"),
        )
        words = self._words(self.form.result_words)
        return self.signature.result_type(**tensors, **words, notes=(*notes, *self._unread()))

    def _made(self, case: Case) -> Inputs:
        given = [
            f"holds the input {name}" for name in self.signature.tensors if name in self.tensors
        ]
        given += [f"gives {name}" for name in self.form.words if name in self.metadata]
        if given:
            raise BundleError(
                f"{self.path} names a case in its metadata and {given[0]} too; leave one of them "
                "out"
            )
        return make_inputs(case)

    def _given(self) -> Inputs:
        missing = [
            name
            for name, tensor in self.signature.tensors.items()
            if tensor.needed and name not in self.tensors
        ]
        if missing:
            parts = {**self.signature.tensors, **self.form.words}
            *first, last = (name for name, part in parts.items() if part.needed)
            raise BundleError(
                f"{self.path} lacks the input {missing[0]}: give {', '.join(first)} and {last}, or "
                "a case line as case in the metadata"
            )
        arguments = {n: self.tensors[n] for n in self.signature.tensors if n in self.tensors}
        try:
            inputs = as_inputs(self.suite, arguments | self._words(self.form.words))
        except ValueError as error:
            raise BundleError(f"{self.path}: {error}") from error
        if wrong := self.signature.mismatch(inputs):
            raise BundleError(f"{self.path}: {wrong}")
        return inputs

    def _words(self, words: Mapping[str, Word]) -> dict[str, Any]:
        """The values of those of these words that are in the metadata."""
        values: dict[str, Any] = {}
        for name, each in words.items():
            text = self.metadata.get(name, "" if each.needed else None)
            if text is None:
                continue
            try:
                values[name] = each.key.parse(text)
            except ValueError:
                raise BundleError(
                    f"{self.path}: {name} is {text!r} in the metadata; accepted is "
                    f"{each.key.accepted}"
                ) from None
        return values

    def _unread(self) -> tuple[str, ...]:
        """A sentence about words of the metadata that mean nothing here."""
        known = {*_OTHER_WORDS, *_LSE_WORDS, *self.form.result_words}
        if self.says_inputs:
            known |= {*self.form.words}
        unread = sorted(self.metadata.keys() - known)
        return (f"not read from the metadata of {self.path}: {', '.join(unread)}",) * bool(unread)


def read_bundle(path: Path, default: str) -> BundleFile:
    """The bundle in a file; `default`: of which suite it is where it names neither suite nor case.

    BundleError for what is no bundle.
    """
    try:
        tensors, metadata = read_tensors(path)
    except ValueError as error:
        raise BundleError(f"{path} can't be taken as a bundle: {error}") from error
    case = _case(path, metadata)
    suite = _suite(path, metadata, case, default)
    accepted = _tensors_of(suite)
    unknown = sorted(tensors.keys() - {*accepted})
    if unknown:
        having = [n for n in FORMATS if n != suite and unknown[0] in _tensors_of(n)]
        hint = f"; {having[0]} has it: give suite={having[0]} in the metadata" if having else ""
        raise BundleError(
            f"{path} holds the tensor {unknown[0]}; accepted are {', '.join(accepted)}{hint}"
        )
    return BundleFile(path=path, suite=suite, tensors=tensors, metadata=metadata, case=case)


def _tensors_of(suite: str) -> list[str]:
    """The tensors that a bundle of a suite may hold."""
    signature = SUITES[suite].signature
    return [*signature.tensors, *signature.results]


def _case(path: Path, metadata: Mapping[str, str]) -> Case | None:
    line = metadata.get("case")
    if line is None:
        return None
    try:
        case = parse_case(line)
    except CaseError as error:
        raise BundleError(f"{path} has an unknown case in its metadata: {error}") from error
    if case.suite not in FORMATS:
        raise BundleError(f"{path} has a case of {case.suite}; bundles hold {_suites()}")
    return case


def _suite(path: Path, metadata: Mapping[str, str], case: Case | None, default: str) -> str:
    suite = metadata.get("suite", default if case is None else case.suite)
    if suite not in FORMATS:
        raise BundleError(f"{path} has suite={suite} in its metadata; accepted is {_suites()}")
    if case is not None and case.suite != suite:
        raise BundleError(f"{path} has suite={suite} in its metadata and a case of {case.suite}")
    return suite


def _suites() -> str:
    return " or ".join(FORMATS)
