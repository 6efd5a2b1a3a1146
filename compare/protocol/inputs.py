"""What an implementation is given, and what it gives back: the bases of the suites' own types."""

from __future__ import annotations

import dataclasses

from compare.protocol.case import Case


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """The arguments of one call. case: where they came from; None for a caller's own."""

    case: Case | None = None

    def sha256(self) -> str:
        """Hash of every argument: names, dtypes, shapes and values."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What one call gives back. notes: what an adapter did on the way, in sentences."""

    notes: tuple[str, ...] = ()
