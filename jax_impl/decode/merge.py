"""Merging attention over disjoint sets of keys, such as the shards of a DCP group.

With states (o_r, l_r), l_r the natural-log sum of exp of a row's logits over the r-th set:

    m = max l_r,   Z = sum exp(l_r - m),   out = sum (exp(l_r - m) / Z) o_r,   lse = m + ln Z

which is attention over the union, whatever the order and the number of the sets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.arrays import dtype_name, is_traced, to_jax
from jax_impl.decode.result import DecodeResult

if TYPE_CHECKING:
    from jaxtyping import Float

_OUT_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LSE_DTYPES = ("float32", "float64")
LseBase = Literal["natural", "base2"]
_BASES = ("natural", "base2")


def merge_states(
    outs: Sequence[Float[Any, "T H V"]] | Float[Any, "N T H V"],
    lses: Sequence[Float[Any, "T H"]] | Float[Any, "N T H"],
    *,
    bases: LseBase | Sequence[LseBase] = "natural",
    debug_nans: bool = False,
) -> DecodeResult:
    """One state from any number of them, each over its own keys.

    Args:
      outs: N >= 1 outputs [..., V], normalised, of one shape and of one dtype: bfloat16, float16,
        float32, or float64 with JAX's 64-bit types enabled.
      lses: as many arrays [...], float32 (or float64), in the base that `bases` declares; their
        numbers alone can't tell which it is. -inf means that the row saw no key, and so does
        +inf, FlashMLA's word for it.
      bases: "natural" or "base2", what lses are logarithms to; one word for all, or one for each
        state. Bases that differ are refused: `lse_from_base2` makes natural-log of base 2.
      debug_nans: raise if an lse is NaN, which a kernel gives only for NaN inputs. Looks at the
        values, so it can't be had inside jit.

    Returns:
      DecodeResult(out of outs' dtype, lse of lses' dtype, natural-log whatever `bases` says).
      Summed in the wider of float32 and the inputs, with weights that add up to 1, and rounded
      once. A state of weight 0 is left out whatever it holds, so a rank
      without keys may leave its output unwritten. A row without keys in every state: out 0, lse
      -inf. A NaN lse is never dropped: the row's out and lse are NaN.

    Raises:
      ValueError: no state, shapes or dtypes that don't fit together, bases that are unknown,
        differ or aren't one for each state, or, with debug_nans, a NaN.
    """
    out_list, lse_list = _states(outs, "outs"), _states(lses, "lses")
    if len(out_list) != len(lse_list):
        raise ValueError(f"lses must be as many as outs, {len(out_list)}; got {len(lse_list)}")
    base = _one_base(bases, len(lse_list))
    out = _stacked(out_list, "outs", _OUT_DTYPES)
    lse = _stacked(lse_list, "lses", _LSE_DTYPES)
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"lses must have the shape of outs without its last axis, {list(out.shape[1:-1])}; "
            f"got {list(lse.shape[1:])}"
        )
    if debug_nans:
        _raise_for_nan(lse)
    return DecodeResult(*_merge(out, lse, base2=base == "base2"))


@functools.partial(jax.jit, static_argnames=("base2",))
def _merge(out: jax.Array, lse: jax.Array, *, base2: bool) -> tuple[jax.Array, jax.Array]:
    exact = jnp.promote_types(lse.dtype, jnp.promote_types(out.dtype, jnp.float32))
    logs = jnp.where(jnp.isposinf(lse), -jnp.inf, lse).astype(exact)
    logs = logs * math.log(2.0) if base2 else logs
    largest = logs.max(axis=0)
    # -inf - -inf is NaN: a row that no state has keys for must not make one.
    shares = jnp.exp(logs - jnp.where(jnp.isneginf(largest), 0, largest))
    total = shares.sum(axis=0)
    empty = total == 0
    # Normalised before they meet the outputs, whose plain sum may be past the largest float.
    weights = (shares / jnp.where(empty, 1, total))[..., None]
    kept = jnp.where(weights == 0, 0, out.astype(exact))
    merged = (weights * kept).sum(axis=0)
    merged_lse = jnp.where(empty, -jnp.inf, largest + jnp.log(jnp.where(empty, 1, total)))
    return merged.astype(out.dtype), merged_lse.astype(lse.dtype)


def lse_from_base2(lse: Float[Any, "..."]) -> Float[Any, "..."]:
    """Natural-log from base-2 log-sum-exp: times ln 2. Infinities and NaN stay what they are.

    FlashInfer gives base 2 unless asked for base e (return_lse_base_on_e), FlashMLA natural-log.
    """
    return to_jax(lse) * math.log(2.0)


def lse_rows(lse: Float[Any, "B H q"]) -> Float[Any, "T H"]:
    """[B, H, q], FlashMLA's layout for uniform batches, as one row per token: [B * q, H]."""
    array = to_jax(lse)
    if array.ndim != 3:
        raise ValueError(f"lse must be [B, H, q]; got shape {list(array.shape)}")
    return array.transpose(0, 2, 1).reshape(-1, array.shape[1])


def _one_base(bases: Any, states: int) -> LseBase:
    """The base that all states are declared to have."""
    words = [bases] * states if isinstance(bases, str) else bases
    if not isinstance(words, (list, tuple)) or len(words) != states:
        raise ValueError(
            f"bases must be one word, or a sequence of one for each of the {states} states; "
            f"got {bases!r}"
        )
    for word in words:
        if word not in _BASES:
            raise ValueError(f"bases must be 'natural' or 'base2'; got {word!r}")
    if len(set(words)) > 1:
        raise ValueError(
            f"bases must be the same for all states; got {', '.join(words)} (lse_from_base2 makes "
            "natural-log of base 2)"
        )
    return "base2" if "base2" in words else "natural"


def _states(values: Any, name: str) -> list[Any]:
    if not isinstance(values, (list, tuple)) and getattr(values, "ndim", 0) < 2:
        raise ValueError(
            f"{name} must be a sequence of arrays or an array with a leading axis of states; "
            f"got {type(values).__name__}"
        )
    states = list(values)
    if not states:
        raise ValueError(f"{name} must hold at least one state; got none")
    return states


def _stacked(states: Sequence[Any], name: str, dtypes: Sequence[str]) -> jax.Array:
    for i, state in enumerate(states):
        if not hasattr(state, "dtype") or dtype_name(state.dtype) not in dtypes:
            got = dtype_name(state.dtype) if hasattr(state, "dtype") else type(state).__name__
            raise ValueError(f"{name}[{i}] must be a {' or '.join(dtypes)} array; got {got}")
        if dtype_name(state.dtype) == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"{name}[{i}] must be at most 32 bits wide unless jax_enable_x64 is set; "
                "got float64, which JAX would round in silence"
            )
        first = states[0]
        if state.dtype != first.dtype or tuple(state.shape) != tuple(first.shape):
            raise ValueError(
                f"{name}[{i}] must be like {name}[0], {dtype_name(first.dtype)} "
                f"{list(first.shape)}; got {dtype_name(state.dtype)} {list(state.shape)}"
            )
    if all(isinstance(state, np.ndarray) for state in states):
        return to_jax(np.stack(states))
    return jnp.stack([to_jax(state) for state in states])


def _raise_for_nan(lse: jax.Array) -> None:
    if is_traced(lse):
        raise ValueError("debug_nans must be off inside jit, where no value can be looked at")
    for state, *row in np.argwhere(np.isnan(np.asarray(lse)))[:1]:
        raise ValueError(
            f"lses[{state}] must not be NaN; it is at {[int(i) for i in row]}: that state is "
            "poisoned, and merging without it would lose its keys"
        )
