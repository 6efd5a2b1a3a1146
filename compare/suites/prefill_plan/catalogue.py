"""The cases of ``prefill-plan``: those whose plans are recorded from an engine."""

from __future__ import annotations

from compare.goldens import files

RECORDED = "engine/vllm-0.33.0"


def lines(full: bool) -> list[str]:
    """The case lines; `full` changes nothing."""
    return list(files.golden_cases(RECORDED))
