"""How the results of a suite are recorded and read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from compare.protocol.inputs import Inputs, Result
from compare.protocol.verdict import Status, Verdict


class Incomplete(ValueError):
    """A result lacks what a recording needs; the message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """What is kept of one result. tensors: by name, of a file of the case's own; none: no file.
    facts: in the manifest, as JSON has them. holds_inputs: whether both hold the inputs too, since
    the case line doesn't make them.
    """

    tensors: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]
    holds_inputs: bool = False


class Records:
    """Base: a suite says what it keeps and makes a result of it again.

    largest_folder: bytes that the files of one folder may have in all. ending: of the folder's
    name, of a kernel that serves several suites.
    """

    largest_folder: ClassVar[int]
    ending: ClassVar[str] = ""

    def keep(self, inputs: Inputs, result: Result) -> Stored:
        """What is kept of the result of `inputs`. Raises Incomplete."""
        raise NotImplementedError

    def restore(self, inputs: Inputs, stored: Stored, notes: tuple[str, ...]) -> Result:
        """The result of `inputs` that was kept. Raises Incomplete where a tensor or fact that a
        result needs isn't among `stored`.
        """
        raise NotImplementedError

    def refusal(self, judge: Callable[..., Verdict], inputs: Inputs, result: Result) -> str | None:
        """Why a result mustn't be compared with, or None. judge: the suite's."""
        return failure(judge(inputs, result, None))

    def source(self, build: Mapping[str, str], place: str) -> str:
        """Who made the results, for the manifest of a new folder. place: the GPU, or none."""
        return f"{build['name']} {build['version']} on {place}"


def failure(verdict: Verdict) -> str | None:
    """What a verdict that isn't PASS says; None of one that is."""
    if verdict.status is Status.PASS:
        return None
    return f"the judge says {verdict.status.value}: {verdict.reason}"
