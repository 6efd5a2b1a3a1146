"""What the implementations of one suite have in common that run inside this process."""

from __future__ import annotations

from compare.protocol.case import Case


class OneSuite[SuiteCase: Case]:
    """Base of a suite's implementations, each of which says what stops it here.

    case_type: of the cases of its suite.
    """

    case_type: type[SuiteCase]

    def __init__(self, name: str, device: str | None = None) -> None:
        self.name = name
        self.device = device

    def unavailable(self) -> str | None:
        """Why nothing can run here at all, in a sentence; None if something can."""
        return None

    def refuses(self, case: SuiteCase) -> str | None:
        """Why this case can't run although others can."""
        return None

    def supports(self, case: Case) -> str | None:
        if not isinstance(case, self.case_type):
            return f"{self.name} isn't for {case.suite}"
        return self.unavailable() or self.refuses(case)
