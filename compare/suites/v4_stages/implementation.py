"""What implementations of single stages of the V4 path have in common."""

from __future__ import annotations

from typing import Any

from compare.protocol.one_suite import OneSuite
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import V4StagesCase


class V4Stages(OneSuite[V4StagesCase, V4StagesInputs]):
    """Base of single stages: a subclass computes each by its name."""

    case_type = V4StagesCase
    inputs_type = V4StagesInputs

    def stage(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        """One stage; `arguments` are a dict of its own."""
        raise NotImplementedError

    def call(self, inputs: V4StagesInputs) -> V4StagesResult:
        return self.stage(inputs.stage, dict(inputs.arguments))
