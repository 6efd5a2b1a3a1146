"""Known faults of single stages of the V4 path, each caught under its own name.

A wrong candidate is torch_ref called with other arguments than it was given, or with what it gave
back spoilt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compare.protocol.verdict import Status
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.faults import FAULTS
from compare.suites.v4_stages.judge import judge
from compare.suites.v4_stages.torch_adapter import TorchV4Stages

PAGED = (
    "v4-stages:stage=paged_swa,seq=300+90+40,q=9+6+4,start=7,ratio=1,window=98,"
    "images=0:292-298+1:86-88,max_image=12,pad=3,spare=2,replay=250,seed=8501"
)
UNREPLAYED = "v4-stages:stage=paged_swa,seq=300+299+298,q=9+8+7,ratio=1,window=98,spare=2,seed=8504"
C128 = "v4-stages:stage=c128,seq=1536+258+128+256,q=2+3+2+2,ratio=128,topk=12,pad=4,seed=8502"
DSPARK = "v4-stages:stage=dspark,seq=300+290+5,q=5+4+5,ratio=1,window=100,pad=2,spare=3,seed=8503"
V32 = "v4-stages:stage=gather,seq=70+40,q=3+4,ratio=1,window=32,page=32,format=v3.2-fp8,seed=8505"
WIDE = V32.replace("v3.2-fp8", "bf16-576")


def inputs_of(case: str) -> V4StagesInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, V4StagesInputs)
    return inputs


def by_torch(inputs: V4StagesInputs, **changes: Any) -> dict[str, np.ndarray]:
    """What torch_ref gives for the arguments, some of them changed."""
    other = V4StagesInputs(stage=inputs.stage, arguments={**inputs.arguments, **changes})
    return {name: array.copy() for name, array in TorchV4Stages("torch").run(other).arrays.items()}


def argument(name: str, change: Callable[[Any], Any]) -> Callable[[V4StagesInputs], dict]:
    return lambda inputs: by_torch(inputs, **{name: change(inputs.arguments[name])})


def without_images(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    return by_torch(inputs, image_left=None, image_right=None)


def nobody_is_padding(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    starts, mapped = inputs.arguments["query_start_loc"], inputs.arguments["slot_mapping"].copy()
    mapped[: starts[-1] - starts[0]] = 5
    return by_torch(inputs, slot_mapping=mapped)


def rows_of_padding_cleared(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    found = by_torch(inputs)
    found["slots"][found["lengths"] == 0] = -1
    return found


def lengths_of_the_width(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    found = by_torch(inputs)
    found["lengths"][found["lengths"] > 0] = found["slots"].shape[1]
    return found


def one_token_at_a_time(
    inputs: V4StagesInputs, first: Callable[[int, int], int], end: Callable[[int, int], int]
) -> dict[str, np.ndarray]:
    """A draft block's lists, with each token's window from position and seq_len."""
    given = inputs.arguments
    found = {name: np.full_like(array, -1) for name, array in by_torch(inputs).items()}
    found["lengths"][:] = 0
    starts, page = given["query_start_loc"] - given["query_start_loc"][0], given["page_size"]
    for request, length in enumerate(given["seq_lens"].tolist()):
        for row in range(starts[request], starts[request + 1]):
            position = length - (starts[request + 1] - row)
            if given["slot_mapping"][row] < 0:
                continue
            seen = np.arange(first(position, length), end(position, length))
            pages = given["block_table"][request, seen // page]
            found["slots"][row, : len(seen)] = pages * page + seen % page
            found["lengths"][row] = len(seen)
    return found


def causal_block(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    window, lengths = inputs.arguments["window"], inputs.arguments["seq_lens"].tolist()
    queries = np.diff(inputs.arguments["query_start_loc"])
    prefixes = dict(zip(lengths, lengths - queries, strict=True))
    return one_token_at_a_time(
        inputs, lambda _, length: max(int(prefixes[length]) - window, 0), lambda pos, _: pos + 1
    )


def window_of_each_token(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    window = inputs.arguments["window"]
    return one_token_at_a_time(
        inputs, lambda pos, _: max(pos - window, 0), lambda _, length: length
    )


def cache_with_scales(
    change: Callable[[np.ndarray], np.ndarray],
) -> Callable[[V4StagesInputs], dict[str, np.ndarray]]:
    """What torch_ref reads of a v3.2-fp8 cache whose scales are changed, token by token."""

    def wrong(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
        cache = inputs.arguments["cache"].copy()
        for page in cache:
            for first in range(512, len(page), 656):
                page[first : first + 16] = change(page[first : first + 16].view("<f4")).view("u1")
        return by_torch(inputs, cache=cache)

    return wrong


def without_rope(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    found = by_torch(inputs)
    D = found["workspace"].shape[2]
    found["workspace"][:, :, D - 64 :] = inputs.arguments["workspace"][:, :, D - 64 :]
    return found


def rounded_to_bfloat16(scales: np.ndarray) -> np.ndarray:
    bits = scales.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


neighbour = argument("block_table", lambda table: np.roll(table, -1, axis=0))
WRONG = (
    (UNREPLAYED, "window-too-short", argument("window", lambda window: window - 1)),
    (UNREPLAYED, "window-too-long", argument("window", lambda window: window + 1)),
    (UNREPLAYED, "neighbour-request", neighbour),
    (PAGED, "image-ignored", without_images),
    (PAGED, "replay-ignored", argument("replay_start", lambda _: None)),
    (PAGED, "padding-listed", nobody_is_padding),
    (PAGED, "width-for-length", lengths_of_the_width),
    (C128, "entry-seen-late", argument("seq_lens", lambda lengths: lengths - 1)),
    (C128, "padding-cleared", rows_of_padding_cleared),
    (C128, "padding-listed", nobody_is_padding),
    (C128, "width-for-length", lengths_of_the_width),
    (DSPARK, "window-too-short", argument("window", lambda window: window - 1)),
    (DSPARK, "window-too-long", argument("window", lambda window: window + 1)),
    (DSPARK, "causal-draft", causal_block),
    (DSPARK, "window-of-each-token", window_of_each_token),
    (DSPARK, "padding-listed", nobody_is_padding),
    (DSPARK, "width-for-length", lengths_of_the_width),
    (DSPARK.replace("290+5", "299+297"), "neighbour-request", neighbour),
    (V32, "scales-ignored", cache_with_scales(np.ones_like)),
    (V32, "scale-in-bfloat16", cache_with_scales(rounded_to_bfloat16)),
    (V32, "scale-a-power-of-two", cache_with_scales(lambda s: np.exp2(np.floor(np.log2(s))))),
    (V32, "rope-left", without_rope),
    (WIDE, "rope-left", without_rope),
)


@pytest.mark.parametrize("case", [PAGED, C128, DSPARK, V32, WIDE])
def test_the_reference_has_no_fault(case: str) -> None:
    inputs = inputs_of(case)
    verdict = judge(inputs, TorchV4Stages("torch").run(inputs))
    assert verdict.status is Status.PASS, verdict.reason


@pytest.mark.parametrize(("case", "name", "wrong"), WRONG)
def test_a_fault_is_caught_under_its_own_name(
    case: str, name: str, wrong: Callable[[V4StagesInputs], dict[str, np.ndarray]]
) -> None:
    inputs = inputs_of(case)
    verdict = judge(inputs, V4StagesResult(arrays=wrong(inputs)))
    assert verdict.status is Status.NUMERIC
    assert [found.name for found in verdict.diagnosis] == [name]
    assert verdict.diagnosis[0].sentence.startswith(f"{inputs.stage}: ")


def test_each_fault_has_a_wrong_candidate() -> None:
    assert {fault.name for fault in FAULTS} == {name for _, name, _ in WRONG}


def test_a_difference_that_no_fault_makes_has_the_array_s_name() -> None:
    inputs = inputs_of(PAGED)
    arrays = by_torch(inputs)
    arrays["slots"][3, 2] = 1
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert [found.name for found in verdict.diagnosis] == ["wrong-slots"]
    assert "is due for request 0, position 294" in verdict.reason
    arrays = by_torch(inputs)
    arrays["slots"][-1, 0] = 1
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert "-1 is due behind the tokens of the batch" in verdict.reason
