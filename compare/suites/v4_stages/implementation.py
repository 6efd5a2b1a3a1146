"""What implementations of single stages of the V4 path have in common."""

from __future__ import annotations

from typing import Any

from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs
from compare.protocol.one_suite import OneSuite
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import V4StagesCase


class V4Stages(OneSuite[V4StagesCase]):
    """Base of single stages: a subclass computes each by its name."""

    suites = frozenset({"v4-stages"})
    case_type = V4StagesCase

    def call(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        """One stage."""
        raise NotImplementedError

    def run(self, inputs: Inputs) -> V4StagesResult:
        if not isinstance(inputs, V4StagesInputs):
            raise Unsupported(f"{self.name} is for v4-stages")
        return self.call(inputs.stage, dict(inputs.arguments))
