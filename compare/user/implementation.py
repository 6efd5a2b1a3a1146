"""A function of the user's own as an implementation."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from compare.houses.ranks import run_shards
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.plans import DecodePlanInputs, PrefillPlanInputs
from compare.protocol import arrays as convert
from compare.protocol.case import Case
from compare.protocol.implementation import UnknownImplementation, Unsupported
from compare.protocol.inputs import Inputs, Result
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.sparse_prefill.chunks import run_chunks
from compare.suites.v4_prefill.call import V4PrefillInputs, V4PrefillResult
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.user.answers import (
    dcp_decode_result,
    decode_plan_result,
    plan_result,
    sparse_prefill_result,
    v4_prefill_result,
    v4_stages_result,
)
from compare.user.candidate import options_of
from compare.user.lse_convention import as_declared

# A suite is served by what takes the argument that only this suite has.
_TELLING = {
    "sparse-prefill": "indices",
    "prefill-plan": "query_lens",
    "dcp-decode": "block_table",
    "decode-plan": "max_query_len",
    "v4-prefill": "swa_cache",
    "v4-stages": "stage",
}
_TENSOR_SUITES = frozenset({"sparse-prefill", "dcp-decode", "v4-prefill", "v4-stages"})
_PLAN_ARGUMENTS = (
    "seq_lens",
    "query_lens",
    "compress_ratio",
    "window",
    "max_model_len",
    "max_num_batched_tokens",
    "chunk_size",
    "has_compressed",
)
_DECODE_PLAN_ARGUMENTS = (
    "query_start_loc",
    "total_lens",
    "max_query_len",
    "causal",
    "num_rows",
)
_GROUP = ("dcp_rank", "dcp_world", "interleave")
_DECODE_ARRAYS = (
    "q",
    "kv_cache",
    "block_table",
    "seq_lens",
    "query_start_loc",
    "total_lens",
)


def is_user_name(name: str) -> bool:
    """Whether a name is one of ours to look up: MODULE:FUNCTION or FILE.py:FUNCTION."""
    return ":" in name and not name.startswith("golden:")


def load(name: str) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names, its module imported here.

    The working directory and a file's own folder come first on sys.path. UnknownImplementation
    where the file, the module or the function doesn't exist; whatever the module raises while it
    is imported goes through.
    """
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise UnknownImplementation(
            f"{name!r} isn't a function's name; write MODULE:FUNCTION or FILE.py:FUNCTION"
        )
    _first_on_path(Path.cwd())
    module = _load_file(Path(home)) if home.endswith(".py") else _load_module(home)
    value: Any = module
    for word in path.split("."):
        if not hasattr(value, word):
            names = [n for n in vars(value) if callable(getattr(value, n, None))]
            nearest = difflib.get_close_matches(word, names, n=1)
            hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
            raise UnknownImplementation(f"{home} has no function {path!r}{hint}")
        value = getattr(value, word)
    if not callable(value):
        raise UnknownImplementation(f"{name} is a {type(value).__name__}, not a function")
    return value


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UnknownImplementation(f"there is no file {file}")
    _first_on_path(file.resolve().parent)
    # Its own name, so that what it pickles or compiles finds it; not in the place of another's.
    name = file.stem if file.stem not in sys.modules else f"candidate_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the module that was asked for, or a package around it: not one that it imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UnknownImplementation(
            f"there is no module {error.name!r}, asked for by {name!r}"
        ) from None


def _first_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class UserImplementation:
    """A function behind the protocol: arguments as its decorator says, its answer as it is.

    device: what the run asked for; the decorator's own word goes first.
    """

    def __init__(
        self, function: Callable[..., Any], name: str | None = None, device: str | None = None
    ) -> None:
        self.function = function
        self.options = options_of(function)
        fallback = (
            f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
        )
        self.name = self.options.name or name or fallback
        self.suites = _suites(function)
        self._device = self.options.device or device

    def warm_up(self) -> None:
        """Imports the framework whose arrays the function gets."""
        if self.suites & _TENSOR_SUITES:
            _sender(self.options.framework, self._device)

    def supports(self, case: Case) -> str | None:
        if case.suite not in self.suites:
            return (
                f"{self.name} takes no argument {_TELLING[case.suite]!r}, "
                f"so it isn't for {case.suite}"
            )
        if isinstance(case, DcpDecodeCase) and case.q_dtype != "bf16":
            reason = self._no_query_scale()
            if reason:
                return reason
        return None if self.options.supports is None else self.options.supports(case)

    def _no_query_scale(self) -> str | None:
        if _takes(self.function, "q_scale"):
            return None
        return f"{self.name} takes no argument 'q_scale', so it isn't for float8 queries"

    def run(self, inputs: Inputs) -> Result:
        if isinstance(inputs, PrefillPlanInputs):
            chunks = self.function(**{name: getattr(inputs, name) for name in _PLAN_ARGUMENTS})
            return plan_result(chunks, self.name)
        if isinstance(inputs, DecodePlanInputs):
            names = (*_DECODE_PLAN_ARGUMENTS, *(n for n in _GROUP if _takes(self.function, n)))
            rows = self.function(**{name: getattr(inputs, name) for name in names})
            return decode_plan_result(rows, self.name, inputs)
        if isinstance(inputs, DcpDecodeInputs):
            if inputs.shards is not None:
                return run_shards(self._decode, inputs)
            return self._decode(inputs)
        if isinstance(inputs, V4PrefillInputs):
            return self._v4_prefill(inputs)
        if isinstance(inputs, V4StagesInputs):
            return self._v4_stage(inputs)
        if inputs.chunks is not None:
            return run_chunks(self._prefill, inputs)
        return self._prefill(inputs)

    def _decode(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        send = _sender(self.options.framework, self._device)
        answer = self.function(
            **{name: send(getattr(inputs, name)) for name in _DECODE_ARRAYS},
            **{name: getattr(inputs, name) for name in _GROUP},
            sm_scale=inputs.sm_scale,
            causal=inputs.causal,
            kv_scale=inputs.kv_scale,
            **self._query_scale(inputs),
        )
        result = dcp_decode_result(answer, self.name)
        lse, notes = self._as_declared(result.lse, "dcp-decode")
        return DcpDecodeResult(out=result.out, lse=lse, notes=notes)

    def _query_scale(self, inputs: DcpDecodeInputs) -> dict[str, float | None]:
        """q_scale, where there is one or the function names it; Unsupported where it takes none."""
        if inputs.q_scale is None:
            return {"q_scale": None} if "q_scale" in _arguments(self.function) else {}
        if reason := self._no_query_scale():
            raise Unsupported(reason)
        return {"q_scale": inputs.q_scale}

    def _prefill(self, inputs: SparsePrefillInputs) -> SparsePrefillResult:
        send = _sender(self.options.framework, self._device)
        answer = self.function(
            q=send(inputs.q),
            kv=send(inputs.kv),
            indices=send(inputs.indices),
            sm_scale=inputs.sm_scale,
            d_v=inputs.d_v,
            attn_sink=None if inputs.attn_sink is None else send(inputs.attn_sink),
            topk_length=None if inputs.topk_length is None else send(inputs.topk_length),
        )
        result = sparse_prefill_result(answer, self.name)
        lse, notes = self._as_declared(result.lse, "sparse-prefill")
        return SparsePrefillResult(
            out=result.out, max_logits=result.max_logits, lse=lse, notes=notes
        )

    def _v4_prefill(self, inputs: V4PrefillInputs) -> V4PrefillResult:
        send = _sender(self.options.framework, self._device)
        given: dict[str, Any] = {}
        for field in dataclasses.fields(inputs):
            value = getattr(inputs, field.name)
            given[field.name] = send(value) if isinstance(value, np.ndarray) else value
        for name in ("case", "plan_rules"):
            del given[name]
        result = v4_prefill_result(self.function(**given), self.name)
        lse, notes = self._as_declared(result.lse, "v4-prefill")
        return dataclasses.replace(result, lse=lse, notes=notes)

    def _v4_stage(self, inputs: V4StagesInputs) -> V4StagesResult:
        send = _sender(self.options.framework, self._device)
        given = {
            name: send(value) if isinstance(value, np.ndarray) else value
            for name, value in inputs.arguments.items()
        }
        answer = self.function(stage=inputs.stage, **given)
        return v4_stages_result(answer, self.name, inputs.stage)

    def _as_declared(self, lse: np.ndarray, suite: str) -> tuple[np.ndarray, tuple[str, ...]]:
        said = self.options
        return as_declared(lse, suite, base=said.lse, empty_lse=said.empty_lse)


def _suites(function: Callable[..., Any]) -> frozenset[str]:
    """The suites whose telling argument a function names; all where it names none of them: it
    may take anything, and if it doesn't, its own TypeError says which argument it lacks."""
    names = _arguments(function)
    return frozenset(s for s, n in _TELLING.items() if n in names) or frozenset(_TELLING)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names an argument, or takes any."""
    arguments = _arguments(function)
    kinds = {argument.kind for argument in arguments.values()}
    return name in arguments or inspect.Parameter.VAR_KEYWORD in kinds


def _arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What a function says that it takes; nothing where it can't say."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _sender(framework: str, device: str | None) -> Callable[[np.ndarray], Any]:
    """What makes an argument of an array. Always a copy: a function may write to its arguments."""
    if framework == "numpy":
        return lambda array: array.copy()
    if framework == "jax":
        import jax

        platform, _, number = (device or "").partition(":")
        place = jax.devices(platform or None)[int(number or 0)]
        return lambda array: convert.to_jax(array.copy(), place)
    import torch

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return lambda array: convert.to_torch(array, where, copy=True)
