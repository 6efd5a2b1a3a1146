"""This project's own: jax_impl's sparse prefill on each of its backends, and its planner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from compare.cases.inputs import SparsePrefillInputs
from compare.cases.sparse_prefill import SparsePrefillCase
from compare.run.local import Planner, SparsePrefill
from compare.run.result import SparsePrefillResult

INTERPRETER = "pallas-interpret"
INTERPRETERS = frozenset({INTERPRETER, "pallas-fused-interpret"})
"""The names of what runs under the interpreter, whose time a run limits."""
INTERPRETER_BLOCKS = 128
KEYS, HEADS = 64, 64  # of one block of the kernel


def import_jax() -> Any:
    """jax, told not to take most of a GPU's memory at once: torch works on the same one."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    return jax


def jax_device(device: str | None) -> Any:
    """The jax device that a word of the command line means (cpu, cuda, cuda:1; None: the first)."""
    jax = import_jax()
    platform, _, number = (device or "").partition(":")
    devices = jax.devices({"cuda": "gpu"}.get(platform, platform) or None)
    return devices[int(number or 0)]


class JaxBackend:
    """What runs on one of jax_impl's backends, which both of its operations share."""

    name: str
    device: str | None
    backend: str = ""
    """Where it isn't the name."""

    def unavailable(self) -> str | None:
        import_jax()
        from jax_impl.prefill import unsupported_reason

        try:
            return unsupported_reason(self.backend or self.name, jax_device(self.device))
        except (RuntimeError, IndexError) as error:
            return f"jax has no device {self.device!r} here ({error})"

    def compilation(self) -> contextlib.AbstractContextManager[None]:
        """The interpreter's programs run once, for a fraction of the time that XLA would spend on
        making them quick."""
        return _unoptimised() if self.name in INTERPRETERS else contextlib.nullcontext()


class JaxSparsePrefill(JaxBackend, SparsePrefill):
    """jax_impl.sparse_prefill on one backend."""

    def __init__(self, backend: str, device: str | None = None) -> None:
        # The interpreter is a CPU program wherever it runs.
        super().__init__(backend, "cpu" if backend == INTERPRETER else device)

    def warm_up(self) -> None:
        import_jax()
        import jax_impl

        _ = jax_impl.sparse_prefill
        jax_device(self.device)

    def refuses(self, case: SparsePrefillCase) -> str | None:
        if self.name != INTERPRETER:
            return None
        if case.blocks(KEYS, HEADS) <= INTERPRETER_BLOCKS:
            return None
        return (
            f"the interpreter takes cases of at most {INTERPRETER_BLOCKS} blocks of {KEYS} keys x "
            f"{HEADS} heads"
        )

    def call(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        jax = import_jax()
        from jax_impl import sparse_prefill

        attend: Any = sparse_prefill  # NumPy arrays are as welcome as jax's
        with jax.default_device(jax_device(self.device)), self.compilation():
            out, max_logits, lse = attend(
                inputs.q,
                inputs.kv,
                inputs.indices,
                inputs.sm_scale,
                d_v=inputs.d_v,
                attn_sink=inputs.attn_sink,
                topk_length=inputs.topk_length,
                backend=self.name,
            )
            return SparsePrefillResult(
                out=np.asarray(out), max_logits=np.asarray(max_logits), lse=np.asarray(lse)
            )


@contextlib.contextmanager
def _unoptimised() -> Iterator[None]:
    jax = import_jax()
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def jax_planner() -> Planner:
    """jax_impl's chunk planner: the fixed rules."""

    def home() -> Callable[..., Any]:
        from jax_impl.planning import plan_prefill_chunks

        return plan_prefill_chunks

    return Planner("jax-planner", home)
