"""A process of our own to talk to: a fresh interpreter with this one's import path, not a fork.

It isn't started through multiprocessing, which would import the caller's main script again: a
script that calls compare.check needs no guard.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from compare.isolation.transfer import receive, send
from compare.protocol.implementation import TimedOut, WorkerDied

_BOOTSTRAP = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]))"
)
_FATAL = "Fatal Python error"
_SIGNAL_SECONDS = 0.5


class Child:
    """A process that runs MODULE.main(fd): `fd` is its end of a connection of Python objects.

    Its output goes to a file of ours, so that its last words survive it, and with `echo` to our
    stderr too, after each message. It has a session of its own: Ctrl-C reaches this process alone,
    which then ends the child and whatever that started.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, *, echo: bool = False
    ) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._echo = echo
        self._echoed = 0
        words = [json.dumps(sys.path), module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self._process, self.connection, self._log)

    def send(self, message: tuple[Any, ...]) -> None:
        """WorkerDied where nobody listens any more."""
        try:
            send(self.connection, message)
        except OSError:
            self._died()

    def receive(self, timeout: float | None = None) -> Any:
        """The child's next message. WorkerDied when it ends without one; TimedOut, and the child's
        end, after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 0.2 if deadline is None else min(0.2, deadline - time.monotonic())
            if self.connection.poll(max(left, 0.0)):
                try:
                    message = receive(self.connection)
                except (EOFError, OSError):
                    self._died()
                self._pass_on_output()
                return message
            # A grandchild may hold the connection open, so its end doesn't show the child's.
            if self._process.poll() is not None and not self.connection.poll():
                self._died()
            if deadline is not None and time.monotonic() >= deadline:
                self.close()
                raise TimedOut(f"no answer within {timeout:g} s; its process was ended")

    def close(self) -> None:
        """Ends the child at once; harmless twice."""
        if self._end.alive:
            self._pass_on_output()
        self._end()

    def let_end(self, seconds: float) -> None:
        """Waits for a child that was told to end, and ends it where it doesn't."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.close()

    def _output(self, start: int) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), max(size - start, 0), start).decode(errors="replace")

    def _pass_on_output(self) -> None:
        if self._echo:
            size = os.fstat(self._log.fileno()).st_size
            print(self._output(self._echoed), end="", file=sys.stderr, flush=True)
            self._echoed = size

    def _died(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self._process.poll() == -signal.SIGTERM:
            # Sent to every process of a run that is to end, it reaches this one too in a moment;
            # the child's end is then no finding.
            time.sleep(_SIGNAL_SECONDS)
        start = max(os.fstat(self._log.fileno()).st_size - 20_000, 0)
        message = "\n".join([_ending(self._process.poll()), *last_words(self._output(start))])
        self.close()
        raise WorkerDied(message)


def last_words(output: str) -> list[str]:
    """The last lines that tell why a process ended: those before Python's own fatal error and the
    newest frames of the code that met it where there is one, else the last eight."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith(_FATAL)), None)
    if fatal is None:
        return lines[-8:]
    frames = [line for line in lines[fatal:] if line.startswith("  File ")]
    return [*lines[max(fatal - 4, 0) : fatal + 1], *frames[:3]]


def _ending(code: int | None) -> str:
    if code is None:
        return "its process closed the connection and was ended"
    if code >= 0:
        return f"its process ended with exit status {code} before it answered"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = "; the system may have been out of memory" if -code == signal.SIGKILL else ""
    return f"its process was ended by signal {-code} ({name}){hint}"


def _end(process: subprocess.Popen[bytes], connection: Connection, log: Any) -> None:
    with contextlib.suppress(OSError):
        connection.close()
    # With what it started, a compiler say. Not once it was waited for: its number may be another's.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    log.close()
