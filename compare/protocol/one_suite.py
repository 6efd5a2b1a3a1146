"""What the implementations of one suite have in common that run inside this process."""

from __future__ import annotations

from typing import Any, ClassVar

from compare.protocol.case import Case
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs, Result


class OneSuite[SuiteCase: Case, SuiteInputs: Inputs]:
    """Base of a suite's implementations: a subclass computes `call`, and says what stops it here.

    case_type, inputs_type: of its suite. does: what it does, in the sentence about another suite.
    """

    case_type: type[SuiteCase]
    inputs_type: type[SuiteInputs]
    does: ClassVar[str] = ""

    def __init__(self, name: str, device: str | None = None) -> None:
        self.name = name
        self.device = device

    @property
    def suites(self) -> frozenset[str]:
        return frozenset({self.case_type.suite})

    def unavailable(self) -> str | None:
        """Why nothing can run here at all, in a sentence; None if something can."""
        return None

    def refuses(self, case: SuiteCase) -> str | None:
        """Why this case can't run although others can."""
        return None

    def supports(self, case: Case) -> str | None:
        if not isinstance(case, self.case_type):
            does = f" {self.does}; it" if self.does else ""
            return f"{self.name}{does} isn't for {case.suite}"
        return self.unavailable() or self.refuses(case)

    def run(self, inputs: Inputs) -> Any:
        if not isinstance(inputs, self.inputs_type):
            raise Unsupported(f"{self.name} is for {self.case_type.suite}")
        return self.compute(inputs)

    def compute(self, inputs: SuiteInputs) -> Result:
        """All calls of these inputs."""
        return self.call(inputs)

    def call(self, inputs: SuiteInputs) -> Any:
        """One call."""
        raise NotImplementedError
