"""What a function of one stage of the V4 path is called with and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compare.protocol.arrays import to_numpy
from compare.protocol.signature import Signature
from compare.protocol.values import known_word, named_fields
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.case import STAGES


class V4StagesSignature(Signature[V4StagesInputs, V4StagesResult]):
    """The stage's name, and that stage's arguments."""

    def arguments(self, inputs: V4StagesInputs) -> dict[str, Any]:
        return {"stage": inputs.stage, **inputs.arguments}

    def inputs(self, arguments: Mapping[str, Any]) -> V4StagesInputs:
        known_word(arguments["stage"], STAGES, "stage")
        made = {
            name: to_numpy(value, name) if hasattr(value, "shape") else value
            for name, value in arguments["arguments"].items()
        }
        return V4StagesInputs(stage=arguments["stage"], arguments=made)

    def read(self, answer: Any, name: str, inputs: V4StagesInputs) -> V4StagesResult:
        """In the stage's order or by its names, or the array alone where there is one."""
        fields = STAGES[inputs.stage]
        if len(fields) == 1 and hasattr(answer, "shape"):
            answer = (answer,)
        answered = named_fields(answer, name, fields, fields)
        return V4StagesResult(arrays={f: to_numpy(value, f) for f, value in answered.items()})


SIGNATURE = V4StagesSignature(
    inputs_type=V4StagesInputs,
    result_type=V4StagesResult,
    telling="stage",
)
