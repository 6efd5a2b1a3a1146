"""Known faults of single stages, each as what an implementation that has it gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from compare.suites.v4_stages import quantise
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.rules import (
    draft_width,
    slots_of_positions,
    stage_arrays,
    token_places,
)

Arguments = Mapping[str, Any]
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """sentence: what is wrong. result: what such an implementation makes of a stage's arguments."""

    name: str
    stages: tuple[str, ...]
    sentence: str
    result: Callable[[str, Arguments], Arrays]


def fault_of(inputs: V4StagesInputs, found: V4StagesResult) -> Fault | None:
    """The fault that a wrong result shows: all its arrays are what an implementation with it gives.

    found: of the names, shapes and dtypes that are due, and not what is due.
    """
    for fault in FAULTS:
        if inputs.stage not in fault.stages:
            continue
        try:
            arrays = fault.result(inputs.stage, inputs.arguments)
        except (ValueError, IndexError):  # such an implementation finds no place here
            continue
        if all(_equal(array, found.arrays[name]) for name, array in arrays.items()):
            return fault
    return None


def _equal(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()


def _with(**changes: Callable[[Arguments], Any]) -> Callable[[str, Arguments], Arrays]:
    """The rule itself, of changed arguments."""

    def result(stage: str, given: Arguments) -> Arrays:
        changed = {name: change(given) for name, change in changes.items()}
        return stage_arrays(stage, {**given, **changed})

    return result


def _none_is_padding(given: Arguments) -> np.ndarray:
    tokens = int(given["query_start_loc"][-1] - given["query_start_loc"][0])
    mapped = given["slot_mapping"].copy()
    mapped[:tokens] = 0
    return mapped


def _causal_block(stage: str, given: Arguments) -> Arrays:
    request, position = token_places(given)
    lengths = given["seq_lens"].astype(np.int64)
    start = np.maximum(lengths - np.diff(given["query_start_loc"]) - given["window"], 0)
    return slots_of_positions(given, start[request], position + 1, draft_width(given))


def _window_of_each_token(stage: str, given: Arguments) -> Arrays:
    request, position = token_places(given)
    start = np.maximum(position - given["window"], 0)
    end = given["seq_lens"].astype(np.int64)[request]
    return slots_of_positions(given, start, end, draft_width(given))


def _padding_cleared(stage: str, given: Arguments) -> Arrays:
    arrays = stage_arrays(stage, given)
    arrays["slots"][given["slot_mapping"] < 0] = -1
    return arrays


def _all_counted(stage: str, given: Arguments) -> Arrays:
    """As an implementation that takes the width for the length."""
    arrays = stage_arrays(stage, given)
    counted = arrays["lengths"] > 0
    arrays["lengths"][counted] = arrays["slots"].shape[1]
    return arrays


def _with_scales(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[str, Arguments], Arrays]:
    """The rule of a v3.2-fp8 cache with other scales."""

    def result(stage: str, given: Arguments) -> Arrays:
        if given["kv_format"] != "v3.2-fp8":
            raise ValueError("other formats have no scales that aren't powers of two")
        cache = given["cache"].copy()
        tokens = cache.reshape(len(cache), given["page_size"], -1)
        scales = np.ascontiguousarray(tokens[..., 512:528]).view(np.float32)
        tokens[..., 512:528] = change(scales).view(np.uint8)
        return stage_arrays(stage, {**given, "cache": cache})

    return result


def _rope_left(stage: str, given: Arguments) -> Arrays:
    arrays = stage_arrays(stage, given)
    arrays["workspace"][..., -64:] = given["workspace"][..., -64:]
    return arrays


def _written(**changes: Any) -> Callable[[str, Arguments], Arrays]:
    return lambda stage, given: {"cache": quantise.written_cache(given, **changes)}


def _padding_left(stage: str, given: Arguments) -> Arrays:
    if given["kv_format"] != "v4-fp8":
        raise ValueError("other formats have no byte of padding")
    arrays, P = stage_arrays(stage, given), given["page_size"]
    arrays["cache"][:, P * 576 + 7 : P * 584 : 8] = given["cache"][:, P * 576 + 7 : P * 584 : 8]
    return arrays


def _skipped_to_the_last_slot(given: Arguments) -> np.ndarray:
    last = len(given["cache"]) * given["page_size"] - 1
    return np.where(given["slot_mapping"] < 0, last, given["slot_mapping"])


def _values_in_bfloat16(given: Arguments) -> np.ndarray:
    return given["values"].astype(ml_dtypes.bfloat16).astype(np.float32)


_LISTS = ("paged_swa", "c128", "dspark")
_WINDOWS = ("paged_swa", "dspark")

FAULTS = (
    Fault(
        name="scales-ignored",
        stages=("gather",),
        sentence="the codes are not multiplied by their groups' scales",
        result=_with_scales(np.ones_like),
    ),
    Fault(
        name="scale-in-bfloat16",
        stages=("gather",),
        sentence="the scales are rounded to bfloat16 before they are used, as in decode",
        result=_with_scales(lambda scales: scales.astype(ml_dtypes.bfloat16).astype(np.float32)),
    ),
    Fault(
        name="scale-a-power-of-two",
        stages=("gather",),
        sentence="of the scales the exponent alone is used",
        result=_with_scales(lambda s: (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)),
    ),
    Fault(
        name="rope-left",
        stages=("gather",),
        sentence="the last 64 columns are not written",
        result=_rope_left,
    ),
    Fault(
        name="exponent-rounded-down",
        stages=("quantise",),
        sentence="e is floor(log2(amax / 448)), so that the largest values are clamped",
        result=_written(lowered=True),
    ),
    Fault(
        name="floor-missing",
        stages=("quantise",),
        sentence="amax has no floor",
        result=_written(floor=1e-300),
    ),
    Fault(
        name="padding-byte-left",
        stages=("quantise",),
        sentence="the byte of padding behind a token's scales is not written 0",
        result=_padding_left,
    ),
    Fault(
        name="skipped-token-written",
        stages=("quantise",),
        sentence="a token with a slot of -1 is written to the cache's last slot",
        result=_with(slot_mapping=_skipped_to_the_last_slot),
    ),
    Fault(
        name="rounded-twice",
        stages=("quantise",),
        sentence="the values are rounded to bfloat16 before they are quantised",
        result=_with(values=_values_in_bfloat16),
    ),
    Fault(
        name="window-too-long",
        stages=_WINDOWS,
        sentence="each window begins one position too early",
        result=_with(window=lambda given: given["window"] + 1),
    ),
    Fault(
        name="window-too-short",
        stages=_WINDOWS,
        sentence="each window begins one position too late",
        result=_with(window=lambda given: given["window"] - 1),
    ),
    Fault(
        name="image-ignored",
        stages=("paged_swa",),
        sentence="the tokens of an image see what others see, not the whole image",
        result=_with(image_left=lambda _: None, image_right=lambda _: None),
    ),
    Fault(
        name="replay-ignored",
        stages=("paged_swa",),
        sentence="positions before replay_start are listed",
        result=_with(replay_start=lambda _: None),
    ),
    Fault(
        name="causal-draft",
        stages=("dspark",),
        sentence="a token doesn't see those of its draft block that come after it",
        result=_causal_block,
    ),
    Fault(
        name="window-of-each-token",
        stages=("dspark",),
        sentence="the window begins before each token, not before its draft block",
        result=_window_of_each_token,
    ),
    Fault(
        name="entry-seen-late",
        stages=("c128",),
        sentence="a token lists pos // ratio entries, not (pos + 1) // ratio",
        result=_with(seq_lens=lambda given: given["seq_lens"] - 1),
    ),
    Fault(
        name="padding-cleared",
        stages=("c128",),
        sentence="the rows of padding are -1; they are written like any other, their length is 0",
        result=_padding_cleared,
    ),
    Fault(
        name="padding-listed",
        stages=_LISTS,
        sentence="tokens with a negative slot_mapping count as if they were none of padding",
        result=_with(slot_mapping=_none_is_padding),
    ),
    Fault(
        name="width-for-length",
        stages=_LISTS,
        sentence="the lengths are the lists' width",
        result=_all_counted,
    ),
    Fault(
        name="neighbour-request",
        stages=_LISTS,
        sentence="the pages are those of the next request in block_table",
        result=_with(block_table=lambda given: np.roll(given["block_table"], -1, axis=0)),
    ),
)
