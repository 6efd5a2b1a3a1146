"""One name for the implementations of several suites."""

from __future__ import annotations

from collections.abc import Mapping

from compare.protocol.case import Case
from compare.protocol.implementation import Implementation, Unsupported, warm_up
from compare.protocol.inputs import Inputs, Result
from compare.suites.table import suite_of


class Together:
    """Answers each suite with the part that is for it. parts: by suite, at least one."""

    def __init__(self, name: str, parts: Mapping[str, Implementation]) -> None:
        self.name = name
        self.parts = dict(parts)
        self.suites = frozenset(parts)

    def warm_up(self) -> None:
        for part in self.parts.values():
            warm_up(part)

    def unavailable(self) -> str | None:
        """Why none of the parts can run here; None if one can."""
        reasons = [
            ask() if (ask := getattr(part, "unavailable", None)) else None
            for part in self.parts.values()
        ]
        return None if None in reasons else reasons[0]

    def supports(self, case: Case) -> str | None:
        part = self.parts.get(case.suite)
        return f"{self.name} isn't for {case.suite}" if part is None else part.supports(case)

    def run(self, inputs: Inputs) -> Result:
        suite = suite_of(inputs).name
        if suite not in self.parts:
            raise Unsupported(f"{self.name} is for {' and '.join(sorted(self.suites))}")
        return self.parts[suite].run(inputs)
