"""Which ways there are to compute decode: those of sparse prefill, under the same names."""

from __future__ import annotations

from jax_impl.decode.kernel_sm90.work import ROW_ALIGNMENT
from jax_impl.prefill import backends
from jax_impl.prefill.backends import BACKENDS, unsupported_reason

__all__ = ["BACKENDS", "resolve", "unsupported_reason"]


def resolve(backend: str, *, heads: int) -> str:
    """Turns "auto" into the fastest backend that runs here; refuses one that doesn't.

    "auto" takes the kernel only for head counts that were confirmed on a GPU, the multiples of 8:
    the padding of others has run under the interpreter alone.
    """
    if backend == "auto" and heads % ROW_ALIGNMENT:
        return "xla"
    return backends.resolve(backend)
