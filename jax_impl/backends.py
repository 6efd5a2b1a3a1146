"""Which ways there are to compute an operation, and which of them run on this machine."""

from __future__ import annotations

from typing import Any

import jax

BACKENDS = ("auto", "xla", "pallas", "pallas-interpret")

_HOPPER = "9.0"


def unsupported_reason(backend: str, device: Any = None) -> str | None:
    """Why `backend` can't run on `device` (a jax.Device; default: JAX's first), or None if it can.

    Raises ValueError for a name that is not in BACKENDS.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend != "pallas":
        return None
    if device is None:
        device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"pallas needs an NVIDIA Hopper GPU; JAX runs on {device.platform} here"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != _HOPPER:
        return (
            "pallas needs an NVIDIA Hopper GPU (compute capability 9.0); "
            f"{device.device_kind} has {capability}"
        )
    return None


def resolve(backend: str) -> str:
    """Turns "auto" into the fastest backend that runs here; refuses one that doesn't."""
    reason = unsupported_reason(backend)
    if reason is not None:
        raise NotImplementedError(f"backend={backend!r}: {reason}")
    if backend != "auto":
        return backend
    return "xla" if unsupported_reason("pallas") else "pallas"
