"""What a function of one suite is called with and gives back, declared once: from it users'
functions, tensors of a caller's own, files and this project's own adapters are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from compare.protocol.arrays import to_numpy
from compare.protocol.case import Case, Key, number
from compare.protocol.inputs import Inputs, Result
from compare.protocol.values import named_fields, real_number, whole_or_lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """An argument that is an array.

    dtypes: accepted, as NumPy names them. axes: of each axis its size, or its letter, which stands
    for one size throughout a call; X+1 is one more than X, and a last ... any number of axes.
    needed: it can't be None. host: lengths, which torch_ref's functions take on the host.
    """

    dtypes: tuple[str, ...]
    axes: str
    needed: bool = True
    host: bool = False

    def accepts(self, array: np.ndarray) -> bool:
        """Whether dtype, rank and the sizes that are numbers are right."""
        axes = self.axes.removesuffix("...").split()
        open_end = self.axes.endswith("...")
        sizes = zip(axes, array.shape, strict=False)
        return (
            array.dtype.name in self.dtypes
            and (array.ndim >= len(axes) if open_end else array.ndim == len(axes))
            and all(not axis.isdigit() or int(axis) == size for axis, size in sizes)
        )

    def sizes(self, array: np.ndarray) -> Iterator[tuple[str, int]]:
        """The letter of each axis, and the size that the array gives it."""
        for axis, size in zip(self.axes.removesuffix("...").split(), array.shape, strict=False):
            letter, _, more = axis.partition("+")
            yield letter, size - int(more or 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """An argument or a field of a result that isn't an array: how its text in a file is read and
    written."""

    key: Key
    needed: bool = False


NUMBER = Word(key=dataclasses.replace(number(), show=lambda value: repr(float(value))))
SM_SCALE = dataclasses.replace(NUMBER, needed=True)

BF16 = ("bfloat16",)
INT32 = ("int32",)
FLOAT32 = ("float32",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFormat:
    """How one call is kept in a file, beside its tensors. words, result_words: what stands in the
    metadata, of the arguments and of the result. unkept: why a caller's own inputs can't be kept;
    None where they can.
    """

    words: Mapping[str, Word]
    result_words: Mapping[str, Word] = dataclasses.field(default_factory=dict)
    unkept: Callable[[Any], str | None] = lambda inputs: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature[I: Inputs, R: Result]:
    """A suite has one, or one of a subclass where its calls need more than what is declared.
    Arguments are the fields of inputs_type but `case`, and have its defaults.

    telling: a function that names this argument is for this suite, unless it names that of another
    suite whose functions are given this one too.
    tensors: the arguments that are arrays. numbers: those that must be real numbers.
    apart: fields that a caller's mapping can't have. withheld: arguments that functions aren't
    given. optional: arguments that a function may lack, and what it then isn't for ("": nothing).
    results: the arrays of a result, and whether each is needed. answered: what a function gives
    back, in the order of a tuple; none: the suite reads answers itself. beside: what a mapping or
    an object may have besides.
    empty_lse: the lse of an empty row; None: results have no lse.
    takes_arrays: whether functions are called with arrays. file: how calls are kept in files; None:
    they aren't.
    """

    inputs_type: type[I]
    result_type: type[R]
    telling: str
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    numbers: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    results: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    answered: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    empty_lse: str | None = None
    takes_arrays: bool = True
    file: FileFormat | None = None

    def fields(self) -> dict[str, bool]:
        """The arguments that a caller's mapping may have, and whether each is needed."""
        return {
            field.name: field.default is dataclasses.MISSING
            for field in dataclasses.fields(self.inputs_type)
            if field.name not in ("case", *self.apart)
        }

    @property
    def given(self) -> tuple[str, ...]:
        """The arguments that a function is given."""
        return tuple(name for name in self.fields() if name not in self.withheld)

    def arguments(self, inputs: I) -> dict[str, Any]:
        """What a function is given, by keyword; arrays are NumPy."""
        return {name: getattr(inputs, name) for name in self.given}

    def needs(self, case: Case) -> tuple[str, ...]:
        """The optional arguments that the inputs of a case have."""
        return ()

    def run(self, call: Callable[[I], R], inputs: I) -> R:
        """The result of `inputs` by a function of one call, cut into several where they say so."""
        return call(inputs)

    def complete(self, arguments: dict[str, Any]) -> None:
        """Adds, in place, arguments that follow from the others."""

    def inputs(self, arguments: Mapping[str, Any]) -> I:
        """Inputs of a caller's own arguments, arrays of any framework among them. TypeError,
        ValueError for what nothing can be computed with.
        """
        values = dict(arguments)
        if not self.takes_arrays:
            values = {name: whole_or_lengths(value, name) for name, value in values.items()}
        for name in self.tensors:
            if values.get(name) is not None:
                values[name] = to_numpy(values[name], name)
        values |= {name: real_number(values[name], name) for name in self.numbers}
        made = self.inputs_type(**self.shaped(values))
        self.check(made)
        return made

    def shaped(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments in the shape that inputs have, of others that are accepted too."""
        return values

    def check(self, inputs: I) -> None:
        """TypeError, ValueError for what nothing can be computed with. Shapes, dtypes and values
        are the oracle's to look at; None is an argument left out.
        """
        for name in self.tensors:
            value = getattr(inputs, name)
            if value is not None and not isinstance(value, np.ndarray):
                raise TypeError(
                    f"inputs: {name} is a {type(value).__name__}; accepted: a NumPy array"
                )

    def mismatch(self, inputs: I) -> str | None:
        """Which tensor hasn't the declared dtype and axes, each axis against the tensor that set
        its size; None where all have."""
        sizes: dict[str, tuple[int, str]] = {}
        for name, tensor in self.tensors.items():
            array = getattr(inputs, name)
            if array is None:
                continue
            if not tensor.accepts(array):
                accepted = f"{' or '.join(tensor.dtypes)} [{', '.join(tensor.axes.split())}]"
                return f"{name} is {shown(array)}; accepted is {accepted}"
            for letter, size in tensor.sizes(array):
                first, setter = sizes.setdefault(letter, (size, name))
                if size != first:
                    taken = f"so {letter} is {size}, and {first} in {setter}"
                    return f"{name} is {shown(array)}, {taken}"
        return None

    def result(self, answer: Any, name: str, inputs: I) -> R:
        """What a function gives back as a result; shapes and dtypes are the judge's to look at.
        TypeError for what is none."""
        return answer if isinstance(answer, self.result_type) else self.read(answer, name, inputs)

    def read(self, answer: Any, name: str, inputs: I) -> R:
        """An answer that isn't a result yet."""
        return self.result_type(**self.arrays(answer, name))

    def arrays(self, answer: Any, name: str) -> dict[str, Any]:
        """The arrays of an answer: a tuple, a mapping, or an object with these names."""
        needed = [field for field in self.answered if self.results[field]]
        return {
            field: None if value is None and not self.results[field] else to_numpy(value, field)
            for field, value in named_fields(answer, name, self.answered, needed).items()
        }

    def own_result(self, result: Any, name: str, inputs: I) -> R:
        """A caller's result; TypeError where it is another suite's, or holds what isn't a NumPy
        array."""
        if not isinstance(result, Result):
            return self.result(result, name, inputs)
        kind = self.result_type
        if not isinstance(result, kind):
            raise TypeError(f"{name} is a {type(result).__name__}; accepted: a {kind.__name__}")
        for field, needed in self.results.items():
            value = getattr(result, field)
            if not isinstance(value, np.ndarray) and (needed or value is not None):
                raise TypeError(
                    f"{name}: {field} is a {type(value).__name__}; accepted: a NumPy array"
                )
        return result


def shown(array: np.ndarray) -> str:
    """Dtype and shape of an array, in words."""
    return f"{array.dtype.name} {list(array.shape)}"
