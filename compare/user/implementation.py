"""A function of the user's own as an implementation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compare.protocol import arrays as convert
from compare.protocol.case import Case
from compare.protocol.implementation import Unsupported
from compare.protocol.inputs import Inputs, Result
from compare.protocol.signature import Signature
from compare.protocol.timing import Launch
from compare.suites.table import SUITES, suite_of
from compare.user.candidate import options_of
from compare.user.lse_convention import as_declared


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
        if any(SUITES[suite].signature.takes_arrays for suite in self.suites):
            _sender(self.options.framework, self._device)

    def supports(self, case: Case) -> str | None:
        signature = SUITES[case.suite].signature
        if case.suite not in self.suites:
            return (
                f"{self.name} takes no argument {signature.telling!r}, so it isn't for {case.suite}"
            )
        lacking = [name for name in signature.needs(case) if not _takes(self.function, name)]
        if lacking:
            return self._without(lacking[0], signature)
        return None if self.options.supports is None else self.options.supports(case)

    def run(self, inputs: Inputs) -> Result:
        signature = suite_of(inputs).signature
        return signature.run(functools.partial(self._call, signature), inputs)

    def prepare(self, inputs: Inputs) -> Launch:
        """The function on arguments that lie on its device, called n times in a row."""
        signature = suite_of(inputs).signature
        given = self._sent(signature, inputs)

        def launch(n: int) -> None:
            last = None
            for _ in range(n):
                last = self.function(**given)
            _wait(self.options.framework, last)

        return Launch(
            once=lambda: self._result(signature, self.function(**given), inputs), launch=launch
        )

    def _call(self, signature: Signature[Any, Any], inputs: Inputs) -> Result:
        return self._result(signature, self.function(**self._sent(signature, inputs)), inputs)

    def _sent(self, signature: Signature[Any, Any], inputs: Inputs) -> dict[str, Any]:
        """The function's arguments, arrays in its framework and on its device."""
        given = self._given(signature, signature.arguments(inputs))
        if not signature.takes_arrays:
            return given
        send = _sender(self.options.framework, self._device)
        return {n: send(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}

    def _result(self, signature: Signature[Any, Any], answer: Any, inputs: Inputs) -> Result:
        result = signature.result(answer, self.name, inputs)
        if signature.empty_lse is None:
            return result
        # Which rows are compared, and how parts were rounded, isn't a candidate's to say.
        names = (*signature.answered, *signature.beside)
        fields = {name: getattr(result, name) for name in names}
        fields["lse"], notes = as_declared(
            fields["lse"],
            signature.empty_lse,
            base=self.options.lse,
            empty_lse=self.options.empty_lse,
        )
        return signature.result_type(**fields, notes=notes)

    def _given(self, signature: Signature[Any, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments but the optional ones that the function lacks; Unsupported where it can't
        do without."""
        for name, purpose in signature.optional.items():
            value = arguments[name]
            if name in _parameters(self.function) or (
                value is not None and _takes(self.function, name)
            ):
                continue
            if value is not None and purpose:
                raise Unsupported(self._without(name, signature))
            del arguments[name]
        return arguments

    def _without(self, name: str, signature: Signature[Any, Any]) -> str:
        purpose = signature.optional[name]
        return f"{self.name} takes no argument {name!r}, so it isn't for {purpose}"


def _suites(function: Callable[..., Any]) -> frozenset[str]:
    """The suites whose telling argument a function names; all where it names none of them: it
    may take anything, and if it doesn't, its own TypeError says which argument it lacks."""
    names = _parameters(function)
    told = {n: s.signature for n, s in SUITES.items() if s.signature.telling in names}
    clear = (
        name
        for name, mine in told.items()
        if not any(mine.telling in other.given for other in told.values() if other is not mine)
    )
    return frozenset(clear) or frozenset(SUITES)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function names an argument, or takes any."""
    parameters = _parameters(function)
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
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


def _wait(framework: str, value: Any) -> None:
    """Until everything that was enqueued is done."""
    if framework == "jax":
        import jax

        jax.block_until_ready(value)
    elif framework == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
