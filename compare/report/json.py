"""A report as JSON, and back without loss.

JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity" here,
wherever a number could stand. Every float keeps all its digits, so ``load(dump(report)) ==
report``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from compare.protocol.report import Report

SCHEMA = "mla-crosscheck/report"
SCHEMA_VERSION = 1

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dump(report: Report) -> str:
    """The report as JSON text: schema and version first, then what was found, then every row.
    `compared` and `exit_status` are written for readers that aren't this program; `load` derives
    them again.
    """
    text = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "exit_status": report.exit_status,
        "compared": report.compared,
        **_encode(report),
    }
    return _written(text) + "\n"


def _written(text: dict[str, Any]) -> str:
    """One line for each field, and for each row."""
    lines = []
    for name, value in text.items():
        if name == "rows" and value:
            words = "[\n" + ",\n".join(_line(row) for row in value) + "\n]"
        else:
            words = _line(value)
        lines.append(f"{_line(name)}: {words}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def load(text: str) -> Report:
    """The report that `dump` wrote. ValueError, in a sentence, for any other text."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the report isn't JSON: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema: {schema!r}; accepted: {SCHEMA!r}")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version: {data.get('schema_version')!r}; accepted: {SCHEMA_VERSION}"
        )
    return _decode(Report, data, "report")


def _encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that `hint` names; the types are those that verdicts and reports
    consist of.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _decode(hint, value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_fields(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
        pairs = zip(arguments, value, strict=True)
        return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(pairs))
    if origin in (dict, Mapping):
        return {key: _decode(arguments[1], v, f"{where}[{key!r}]") for key, v in value.items()}
    if hint is float:
        return _WORDS[value] if isinstance(value, str) and value in _WORDS else float(value)
    if not isinstance(value, hint):
        raise ValueError(f"{where}: {value!r}; accepted: {hint.__name__}")
    return value


def _decode_fields(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r}; accepted: an object")
    hints = typing.get_type_hints(hint)
    missing = [
        f.name
        for f in dataclasses.fields(hint)
        if f.name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing")
    return hint(
        **{
            name: _decode(hints[name], value[name], f"{where}.{name}")
            for name in hints
            if name in value
        }
    )
