"""What an implementation raised, as plain text that crosses processes and as the judge's status."""

from __future__ import annotations

import dataclasses
import os
import traceback

from compare.protocol.implementation import TimedOut, WorkerDied
from compare.protocol.verdict import Status, Verdict

_LONGEST = 2000
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as text. kind: its type's name. unsupported: it says that the case isn't served.
    frames: the last frames outside this package, oldest first."""

    kind: str
    message: str
    frames: tuple[str, ...] = ()
    unsupported: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        frames = [
            f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<")
        ]
        return cls(
            kind=type(error).__name__,
            message=_shortened(_said(error)),
            frames=tuple(frames[-3:]),
            unsupported=isinstance(error, NotImplementedError),
        )

    def __str__(self) -> str:
        return "\n".join([f"{self.kind}: {self.message}", *(f"  at {f}" for f in self.frames)])


class Raised(RuntimeError):
    """An exception of an implementation in another process; `failure` holds what is known of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def sentence(error: BaseException) -> str:
    """An exception in words, its first line a sentence of its own."""
    if isinstance(error, (WorkerDied, TimedOut)):
        return str(error)
    if isinstance(error, Raised):
        return str(error.failure)
    failure = Failure.of(error)
    return failure.message if failure.unsupported and failure.message else str(failure)


def verdict_of(error: BaseException) -> Verdict:
    """The verdict on a candidate that gave no result."""
    if isinstance(error, WorkerDied):
        status = Status.CRASH
    elif isinstance(error, TimedOut):
        status = Status.TIMEOUT
    elif isinstance(error, NotImplementedError):
        status = Status.UNSUPPORTED
    else:
        status = Status.ERROR
    return Verdict(status=status, reason=sentence(error))


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # it is somebody else's class
        return "(its own message can't be read)"


def _shortened(message: str) -> str:
    """At most 2,000 characters, and how many more there were: XLA's messages run to megabytes."""
    if len(message) <= _LONGEST:
        return message
    return f"{message[:_LONGEST]} ... ({len(message) - _LONGEST:,} more characters)"
