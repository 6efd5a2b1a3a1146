"""What the implementations that run on jax_impl's backends have in common."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from compare.houses.xla_cache import keep_programs
from compare.protocol.inputs import Result
from compare.protocol.suite import lookup
from compare.protocol.timing import Launch

INTERPRETER = "pallas-interpret"

INTERPRETERS = frozenset({INTERPRETER, "pallas-fused-interpret"})
"""The names of what runs under the interpreter, whose time a run limits."""

INTERPRETER_BLOCKS = 128

KEYS, HEADS = 64, 64  # of one block of the kernel

SMALL = 2**22
"""Elements up to which a call on a CPU takes less time than compiling it well."""


@functools.cache
def import_jax() -> Any:
    """jax, told not to take most of a GPU's memory at once, since torch works on the same one, and
    to keep what it compiles."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    keep_programs(jax)
    return jax


def jax_device(device: str | None) -> Any:
    """The jax device that a word of the command line means (cpu, cuda, cuda:1; None: the first)."""
    jax = import_jax()
    platform, _, number = (device or "").partition(":")
    devices = jax.devices({"cuda": "gpu"}.get(platform, platform) or None)
    return devices[int(number or 0)]


class JaxBackend:
    """What runs on one of jax_impl's backends; the first of an implementation's bases.

    backend: where it isn't the name. functions: MODULE:NAME of what it calls, imported before the
    first call. most_blocks, block, rows: how large a case the interpreter takes: blocks of so many
    keys and rows, and what the rows are.
    """

    functions: tuple[str, ...] = ()
    most_blocks: int = INTERPRETER_BLOCKS
    block: tuple[int, int] = (KEYS, HEADS)
    rows: str = "heads"

    def __init__(self, name: str, device: str | None = None, *, backend: str | None = None) -> None:
        self.name = name
        self.backend = backend or name
        # The interpreter is a CPU program wherever it runs.
        self.device = "cpu" if self.backend == INTERPRETER else device

    def warm_up(self) -> None:
        import_jax()
        for word in self.functions:
            lookup(word)
        jax_device(self.device)

    def too_large(self, blocks: Callable[[int, int], int]) -> str | None:
        """Why the interpreter doesn't take a case; None elsewhere, and of a small one. blocks: of
        the case, given their keys and rows."""
        if self.backend != INTERPRETER or blocks(*self.block) <= self.most_blocks:
            return None
        keys, rows = self.block
        return (
            f"the interpreter takes cases of at most {self.most_blocks} blocks of {keys} keys x "
            f"{rows} {self.rows}"
        )

    def unavailable(self) -> str | None:
        import_jax()
        from jax_impl.prefill import unsupported_reason

        try:
            return unsupported_reason(self.backend, jax_device(self.device))
        except (RuntimeError, IndexError) as error:
            return f"jax has no device {self.device!r} here ({error})"

    def compilation(self, elements: int) -> contextlib.AbstractContextManager[None]:
        """How hard XLA tries while it compiles for a call with so many elements in its largest
        array: a program of the interpreter, and one of a small call on a CPU, runs once, for a
        fraction of the time that making it quick would take.
        """
        small = jax_device(self.device).platform == "cpu" and elements <= SMALL
        once = self.name in INTERPRETERS or small
        return _unoptimised() if once else contextlib.nullcontext()


@contextlib.contextmanager
def _unoptimised() -> Iterator[None]:
    jax = import_jax()
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def compiled_launch(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    device: str | None,
    result: Callable[[Any], Result],
) -> Launch:
    """A function compiled for its arguments, which are put on the device; result: what one launch
    gave as the judge's result.
    """
    jax = import_jax()
    place = jax_device(device)
    with jax.default_device(place):
        placed = jax.device_put(list(arguments), place)
        program = jax.jit(function).lower(*placed).compile()

    def once() -> Result:
        return result(jax.block_until_ready(program(*placed)))

    def launch(n: int) -> None:
        last = None
        for _ in range(n):
            last = program(*placed)
        jax.block_until_ready(last)

    return Launch(once=once, launch=launch, program=program)
