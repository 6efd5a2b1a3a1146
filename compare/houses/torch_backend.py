"""What the implementations that run wherever torch does have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compare.protocol.inputs import Result
from compare.protocol.suite import lookup
from compare.protocol.timing import Launch


def torch_device(device: str | None) -> str:
    """The torch device that a word of the command line means; None: cuda where there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


class TorchDevice:
    """What runs wherever torch does."""

    device: str | None
    functions: tuple[str, ...] = ()
    """MODULE:NAME of what it calls, imported before the first call."""

    def warm_up(self) -> None:
        for word in self.functions:
            lookup(word)

    def unavailable(self) -> str | None:
        import torch

        if self.device and self.device.startswith("cuda") and not torch.cuda.is_available():
            return f"torch sees no CUDA GPU here, so there is no device {self.device!r}"
        return None


def torch_launch(call: Callable[[], Any], device: str, result: Callable[[Any], Result]) -> Launch:
    """`call` enqueues one launch; result: what it gave as the judge's result."""

    def once() -> Result:
        return result(call())

    def launch(n: int) -> None:
        import torch

        for _ in range(n):
            call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    return Launch(once=once, launch=launch)
