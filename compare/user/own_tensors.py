"""Tensors of a caller's own as a suite's inputs and results, refused in a sentence where nothing
can be computed with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compare.protocol.case import Case
from compare.protocol.inputs import Inputs, Result
from compare.protocol.values import known_word
from compare.suites.table import SUITES, make_inputs, parse_case, suite_of


def as_inputs(suite: str, inputs: Inputs | Mapping[str, Any] | Case | str) -> Inputs:
    """A suite's inputs from whatever describes them: see `compare.judge`."""
    signature = SUITES[known_word(suite, SUITES, "suite")].signature
    kind = signature.inputs_type
    if isinstance(inputs, tuple(known.inputs_type for known in SUITES.values())):
        if isinstance(inputs, kind):
            signature.check(inputs)
            return inputs
        raise TypeError(f"inputs is a {type(inputs).__name__}; {suite} takes a {kind.__name__}")
    if isinstance(inputs, (str, Case)):
        made = make_inputs(parse_case(inputs) if isinstance(inputs, str) else inputs)
        if isinstance(made, kind):
            return made
        raise ValueError(f"inputs: {inputs} isn't a case of {suite}")
    if not isinstance(inputs, Mapping):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}; accepted: a mapping of {suite}'s arguments, a "
            "case or its line"
        )
    fields = signature.fields()
    for name in inputs:
        known_word(name, fields, f"argument of {suite}")
    arguments = dict(inputs)
    signature.complete(arguments)
    for name, needed in fields.items():
        if needed and arguments.get(name) is None:
            raise ValueError(f"inputs: {name} is missing; {suite} needs it")
    return signature.inputs(arguments)


def as_result(inputs: Inputs, result: Any, name: str) -> Result:
    """A result of `inputs` from whatever holds it; `name` is what sentences call it."""
    return suite_of(inputs).signature.own_result(result, name, inputs)
