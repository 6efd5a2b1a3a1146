"""Which ways there are to compute decode: those of sparse prefill, under the same names."""

from jax_impl.prefill.backends import BACKENDS, resolve, unsupported_reason

__all__ = ["BACKENDS", "resolve", "unsupported_reason"]
