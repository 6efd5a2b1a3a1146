"""The prefill planner of an importable vLLM, as it is, behind this project's signature.

It is a method of a metadata dataclass (`DeepseekSparseSWAMetadata.get_prefill_chunk_plan`, as of
vLLM 0.33.0) that reads a handful of the fields and returns (start, end, N, M) rows. The adapter
fills those fields, leaves the others empty, and looks at names before it calls anything: a vLLM
whose planner has moved or wants more is refused with what was looked for. The stages of its V4
prefill are in vllm_stages.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from torch_ref.planning import PrefillChunk, gathers_compressed

_MODULE = "vllm.v1.attention.backends.mla.sparse_swa"
_CLASS = "DeepseekSparseSWAMetadata"
_METHOD = "get_prefill_chunk_plan"
_FIELDS = frozenset(
    {
        "num_prefills",
        "prefill_seq_lens_cpu",
        "prefill_query_lens_cpu",
        "prefill_window_size",
        "prefill_max_model_len",
        "prefill_max_num_batched_tokens",
    }
)
_ARGUMENTS = frozenset({"compress_ratio", "prefill_chunk_size"})
_OPTIONAL_ARGUMENTS = frozenset({"has_compressed"})


def unsupported_reason() -> str | None:
    """None if an importable vLLM has the planner in a form that this adapter knows."""
    try:
        _metadata_class()
    except NotImplementedError as error:
        return str(error)
    return None


def version() -> str | None:
    """The importable vLLM's version; None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))
    except Exception:  # the reason is unsupported_reason's to give
        return None


def plan_prefill_chunks(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    compress_ratio: int,
    window: int = 128,
    max_model_len: int,
    max_num_batched_tokens: int,
    chunk_size: int = 4,
    has_compressed: bool | None = None,
) -> tuple[PrefillChunk, ...]:
    """vLLM's own plan of this batch; arguments as in torch_ref.planning.plan_prefill_chunks.

    NotImplementedError: no vLLM, or one whose planner isn't as known; whatever the planner itself
    raises comes through.
    """
    metadata_class = _metadata_class()
    arguments: dict[str, Any] = {
        "compress_ratio": compress_ratio,
        "prefill_chunk_size": chunk_size,
    }
    if "has_compressed" in inspect.signature(getattr(metadata_class, _METHOD)).parameters:
        arguments["has_compressed"] = has_compressed
    elif gathers_compressed(compress_ratio, has_compressed) != (compress_ratio > 1):
        raise NotImplementedError(
            f"has_compressed={has_compressed} with compress_ratio={compress_ratio}: the planner of "
            f"vLLM {version()} has no such argument and takes ratio > 1 for it"
        )

    values: dict[str, Any] = {
        field.name: None
        for field in dataclasses.fields(metadata_class)
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }
    values |= {
        "num_prefills": len(seq_lens),
        "prefill_seq_lens_cpu": torch.tensor(list(seq_lens), dtype=torch.int32),
        "prefill_query_lens_cpu": torch.tensor(list(query_lens), dtype=torch.int32),
        "prefill_window_size": window,
        "prefill_max_model_len": max_model_len,
        "prefill_max_num_batched_tokens": max_num_batched_tokens,
    }
    plan = getattr(metadata_class(**values), _METHOD)(**arguments)

    first_token = [0, *accumulate(query_lens)]
    chunks = []
    for row in plan:
        if len(row) != 4:
            raise NotImplementedError(
                f"vLLM {version()} gave a chunk {tuple(row)}; known are rows (start, end, N, M)"
            )
        start, end, N, M = (int(value) for value in row)
        chunks.append(PrefillChunk(start, end, N, M, first_token[start], first_token[end]))
    return tuple(chunks)


def _metadata_class() -> Any:
    """The class that holds the planner; NotImplementedError says what is missing or different."""
    if importlib.util.find_spec("vllm") is None:
        raise NotImplementedError("vllm isn't importable here")
    try:
        module = importlib.import_module(_MODULE)
    except Exception as error:  # importing an engine can fail in any way; none of them is ours
        raise NotImplementedError(
            f"vLLM {version()}: {_MODULE} doesn't import ({type(error).__name__}: {error})"
        ) from error
    metadata_class = getattr(module, _CLASS, None)
    method = getattr(metadata_class, _METHOD, None)
    if method is None:
        raise NotImplementedError(f"vLLM {version()}: {_MODULE} has no {_CLASS}.{_METHOD}")
    if not dataclasses.is_dataclass(metadata_class):
        raise NotImplementedError(f"vLLM {version()}: {_CLASS} isn't the dataclass it was")
    missing = _FIELDS - {field.name for field in dataclasses.fields(metadata_class) if field.init}
    if missing:
        raise NotImplementedError(
            f"vLLM {version()}: {_CLASS} has no field {', '.join(sorted(missing))}"
        )
    _check_signature(method)
    return metadata_class


def _check_signature(method: Any) -> None:
    parameters = dict(list(inspect.signature(method).parameters.items())[1:])
    absent = _ARGUMENTS - parameters.keys()
    unknown = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        and name not in _ARGUMENTS | _OPTIONAL_ARGUMENTS
    ]
    if absent or unknown:
        raise NotImplementedError(
            f"vLLM {version()}: {_CLASS}.{_METHOD}({', '.join(parameters)}) isn't as known: "
            f"looked for {', '.join(sorted(_ARGUMENTS))}"
            + (f"; can't fill {', '.join(unknown)}" if unknown else "")
        )
