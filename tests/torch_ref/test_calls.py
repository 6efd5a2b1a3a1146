"""Functions whose signature is the fields of a dataclass."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import get_type_hints

import pytest

import torch_ref
from torch_ref.calls import called_with


@dataclass(frozen=True)
class Sum:
    a: int
    _: KW_ONLY
    b: int = 2


@dataclass(frozen=True, kw_only=True)
class Product(Sum):
    times: float


@called_with(Product)
def product(call: Product) -> float:
    """Adds and multiplies."""
    return (call.a + call.b) * call.times


def test_arguments_arrive_as_the_fields_of_one_call():
    assert product(1, times=3.0) == 9.0
    assert product(a=1, b=4, times=2.0) == 10.0


def test_the_signature_is_that_of_the_fields():
    assert str(inspect.signature(product)) == (
        "(a: 'int', *, b: 'int' = 2, times: 'float') -> 'float'"
    )
    assert get_type_hints(product) == {"a": int, "b": int, "times": float, "return": float}
    assert (product.__name__, product.__doc__) == ("product", "Adds and multiplies.")


@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"a": 1, "times": 2.0, "c": 3}])
def test_missing_and_unknown_arguments_are_type_errors(arguments):
    with pytest.raises(TypeError, match=r"missing 1 required|missing 2 required|unexpected.*'c'"):
        product(**arguments)


@pytest.mark.parametrize(
    ("name", "positional", "last"),
    [
        ("dcp_decode_oracle", 6, ["q_scale", "rows", "device", "variant"]),
        ("dcp_decode", 6, ["q_scale", "out_dtype", "rows", "device"]),
        ("flat_v4_call", 6, ["attn_sink", "image_spans", "max_image_tokens"]),
        ("v4_prefill", 6, ["plan", "rules", "attend", "keep_stages"]),
    ],
)
def test_public_functions_show_their_own_arguments(name, positional, last):
    parameters = inspect.signature(getattr(torch_ref, name)).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * positional + [
        inspect.Parameter.KEYWORD_ONLY
    ] * (len(kinds) - positional)
    assert list(parameters)[-len(last) :] == last
