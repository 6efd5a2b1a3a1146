"""A bundle's file as it was found, and what it says: read once, refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compare.bundle.formats import FORMATS, BundleFormat, Word
from compare.protocol.case import Case, CaseError, word
from compare.protocol.inputs import Inputs
from compare.protocol.tensor_file import read_tensors
from compare.run.api import as_inputs
from compare.suites.table import make_inputs, parse_case
from compare.user.candidate import EMPTY_LSES, LSE_BASES
from compare.user.lse_convention import as_declared

_LSE_WORDS = {"lse": Word(key=word(*LSE_BASES)), "empty_lse": Word(key=word(*EMPTY_LSES))}
# format is the framework's own note of who wrote a file.
_OTHER_WORDS = ("suite", "case", "input_sha256", "format")


class BundleError(ValueError):
    """A bundle can't be understood; the message is a sentence with the file, what was found and
    what is accepted."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BundleFile:
    """One bundle. Every method raises BundleError for what can't be taken."""

    path: Path
    form: BundleFormat
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]
    case: Case | None

    @property
    def says_inputs(self) -> bool:
        """Whether the call can be had from this file alone."""
        return self.case is not None or any(name in self.tensors for name in self.form.tensors)

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
        found = {name: self.tensors.get(name) for name in self.form.results}
        rows = found["out_rows"]
        if rows is not None and (rows.dtype != np.int32 or rows.ndim != 1):
            raise BundleError(f"{self.path}: out_rows is {_shown(rows)}; accepted is int32 [R]")
        said = self._words(_LSE_WORDS)
        found["lse"], notes = as_declared(
            self.tensors["lse"],
            self.form.suite,
            base=said.get("lse", "natural"),
            empty_lse=said.get("empty_lse"),
        )
        words = self._words(self.form.result_words)
        return self.form.result_type(**found, **words, notes=(*notes, *self._unread()))

    def _made(self, case: Case) -> Inputs:
        given = [f"holds the input {name}" for name in self.form.tensors if name in self.tensors]
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
            for name, tensor in self.form.tensors.items()
            if tensor.needed and name not in self.tensors
        ]
        if missing:
            *first, last = self.form.needed
            raise BundleError(
                f"{self.path} lacks the input {missing[0]}: give {', '.join(first)} and {last}, or "
                "a case line as case in the metadata"
            )
        arguments = {n: self.tensors[n] for n in self.form.tensors if n in self.tensors}
        try:
            inputs = as_inputs(self.form.suite, arguments | self._words(self.form.words))
        except ValueError as error:
            raise BundleError(f"{self.path}: {error}") from error
        self._check_tensors(inputs)
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

    def _check_tensors(self, inputs: Inputs) -> None:
        """Checks dtypes and axes, each axis against the tensor that set its size."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, tensor in self.form.tensors.items():
            array = getattr(inputs, name)
            if array is None:
                continue
            axes = tensor.axes.split()
            fixed = [int(axis) if axis.isdigit() else None for axis in axes]
            if (
                array.dtype.name not in tensor.dtypes
                or array.ndim != len(axes)
                or any(due not in (None, n) for due, n in zip(fixed, array.shape, strict=True))
            ):
                accepted = f"{' or '.join(tensor.dtypes)} [{', '.join(axes)}]"
                raise BundleError(f"{self.path}: {name} is {_shown(array)}; accepted is {accepted}")
            for axis, size in zip(axes, array.shape, strict=True):
                letter, _, more = axis.partition("+")
                size -= int(more or 0)
                first, setter = sizes.setdefault(letter, (size, name))
                if size != first:
                    raise BundleError(
                        f"{self.path}: {name} is {_shown(array)}, so {letter} is {size}, and "
                        f"{first} in {setter}"
                    )

    def _unread(self) -> tuple[str, ...]:
        """A sentence about words of the metadata that mean nothing here."""
        known = {*_OTHER_WORDS, *_LSE_WORDS, *self.form.result_words}
        if self.says_inputs:
            known |= {*self.form.words}
        unread = sorted(self.metadata.keys() - known)
        return (f"not read from the metadata of {self.path}: {', '.join(unread)}",) * bool(unread)


def read_bundle(path: Path, default: BundleFormat) -> BundleFile:
    """The bundle in a file; `default`: of which suite it is where it names neither suite nor case.

    BundleError for what is no bundle.
    """
    try:
        tensors, metadata = read_tensors(path)
    except ValueError as error:
        raise BundleError(f"{path} can't be taken as a bundle: {error}") from error
    case = _case(path, metadata)
    form = _form(path, metadata, case, default)
    unknown = sorted(tensors.keys() - {*form.tensors, *form.results})
    if unknown:
        hint = [
            f"; {other.suite} has it: give suite={other.suite} in the metadata"
            for other in FORMATS.values()
            if other is not form and unknown[0] in (*other.tensors, *other.results)
        ]
        raise BundleError(
            f"{path} holds the tensor {unknown[0]}; accepted are "
            f"{', '.join([*form.tensors, *form.results])}{''.join(hint[:1])}"
        )
    return BundleFile(path=path, form=form, tensors=tensors, metadata=metadata, case=case)


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


def _form(
    path: Path, metadata: Mapping[str, str], case: Case | None, default: BundleFormat
) -> BundleFormat:
    suite = metadata.get("suite", default.suite if case is None else case.suite)
    if suite not in FORMATS:
        raise BundleError(f"{path} has suite={suite} in its metadata; accepted is {_suites()}")
    if case is not None and case.suite != suite:
        raise BundleError(f"{path} has suite={suite} in its metadata and a case of {case.suite}")
    return FORMATS[suite]


def _suites() -> str:
    return " or ".join(FORMATS)


def _shown(array: np.ndarray) -> str:
    return f"{array.dtype.name} {list(array.shape)}"
