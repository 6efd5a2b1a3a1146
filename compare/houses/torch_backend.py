"""What the implementations that run wherever torch does have in common."""

from __future__ import annotations


def torch_device(device: str | None) -> str:
    """The torch device that a word of the command line means; None: cuda where there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


class TorchDevice:
    """What runs wherever torch does."""

    device: str | None

    def unavailable(self) -> str | None:
        import torch

        if self.device and self.device.startswith("cuda") and not torch.cuda.is_available():
            return f"torch sees no CUDA GPU here, so there is no device {self.device!r}"
        return None
