"""The judge: does an attention kernel compute the same thing as FlashMLA, and if not, where not?

    compare.check("my_pkg.kernels:my_sparse_prefill")              a Report on the suite's cases
    compare.judge("sparse-prefill", inputs, result)                a Verdict on tensors of one's own
    compare.assert_agrees("sparse-prefill", inputs, result)        the same in one's own tests
    @compare.candidate(framework="jax")                            how a function wants to be called

Importing this brings neither torch nor jax: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from compare.user.candidate import candidate

if TYPE_CHECKING:
    from compare.run.api import assert_agrees, check, judge

    __version__: str

__all__ = ["__version__", "assert_agrees", "candidate", "check", "judge"]

_API = "compare.run.api"
_LAZY = ("assert_agrees", "check", "judge")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from compare._version import version

        return version()
    if name in _LAZY:
        return getattr(importlib.import_module(_API), name)
    raise AttributeError(f"module 'compare' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
