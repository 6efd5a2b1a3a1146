"""The cases of ``prefill-plan``: those whose plans are recorded from an engine."""

from __future__ import annotations

from compare.goldens.files import golden_cases

RECORDED = "engine/vllm-0.33.0"


def lines(full: bool) -> list[str]:
    """The case lines; `full` changes nothing."""
    return list(golden_cases(RECORDED))
