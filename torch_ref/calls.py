"""A signature that several functions have, written once: as the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import get_type_hints


def called_with[**P, Call, Result](
    make_call: Callable[P, Call],
) -> Callable[[Callable[[Call], Result]], Callable[P, Result]]:
    """Gives a function of one `make_call` dataclass that dataclass's fields as its arguments."""
    signature, types = inspect.signature(make_call), get_type_hints(make_call)

    def decorate(function: Callable[[Call], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def with_fields(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(make_call(*args, **kwargs))

        returned = function.__annotations__["return"]
        with_fields.__annotations__ = {
            **{name: types[name] for name in signature.parameters},
            "return": returned,
        }
        vars(with_fields)["__signature__"] = signature.replace(return_annotation=returned)
        return with_fields

    return decorate
