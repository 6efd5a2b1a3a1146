"""A kernel's tuning as it is written on the command line."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any


def config_words(text: str, config: type) -> tuple[str, dict[str, Any]]:
    """NAME:key=value,key=value as the name and the arguments of a Config. Raises ValueError."""
    name, colon, words = text.partition(":")
    known = {field.name: field.default for field in dataclasses.fields(config)}
    values = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            raise ValueError(f"--config {text}: {word!r} isn't accepted; keys: {', '.join(known)}")
        values[key] = _value(value, known[key])
    if not name or not colon:
        raise ValueError(f"--config {text}: write NAME:key=value,key=value")
    return name, values


def _value(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return text.lower() in ("1", "true")
    if isinstance(default, int | float):
        return type(default)(ast.literal_eval(text))
    return None if text == "None" else text
