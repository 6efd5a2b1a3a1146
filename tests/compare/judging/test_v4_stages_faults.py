"""Known faults of single stages of the V4 path, each caught under its own name.

A wrong candidate is torch_ref called with other arguments than it was given, or with what it gave
back spoilt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compare.protocol.verdict import Status
from compare.suites.table import make_inputs, parse_case
from compare.suites.v4_stages.call import V4StagesInputs, V4StagesResult
from compare.suites.v4_stages.faults import FAULTS
from compare.suites.v4_stages.judge import judge
from compare.suites.v4_stages.torch_adapter import TorchV4Stages
from torch_ref.kv_cache import FORMATS

PAGED = (
    "v4-stages:stage=paged_swa,seq=300+90+40,q=9+6+4,start=7,ratio=1,window=98,"
    "images=0:292-298+1:86-88,max_image=12,pad=3,spare=2,replay=250,seed=8501"
)
UNREPLAYED = "v4-stages:stage=paged_swa,seq=300+299+298,q=9+8+7,ratio=1,window=98,spare=2,seed=8504"
C128 = "v4-stages:stage=c128,seq=1536+258+128+256,q=2+3+2+2,ratio=128,topk=12,pad=4,seed=8502"
DSPARK = "v4-stages:stage=dspark,seq=300+290+5,q=5+4+5,ratio=1,window=100,pad=2,spare=3,seed=8503"
V32 = "v4-stages:stage=gather,seq=70+40,q=3+4,ratio=1,window=32,page=32,format=v3.2-fp8,seed=8505"
QUANTISE = "v4-stages:stage=quantise,seq=70+40,q=30+12,ratio=1,page=32,pad=1,seed=8506"
QUANTISE_V32 = QUANTISE.replace("page=32,", "page=32,format=v3.2-fp8,")
WIDE = V32.replace("v3.2-fp8", "bf16-576")


def inputs_of(case: str) -> V4StagesInputs:
    inputs = make_inputs(parse_case(case))
    assert isinstance(inputs, V4StagesInputs)
    return inputs


def arguments_of(inputs: V4StagesInputs) -> dict[str, Any]:
    return dict(inputs.arguments)


def by_torch(inputs: V4StagesInputs, **changes: Any) -> dict[str, np.ndarray]:
    """What torch_ref gives for the arguments, some of them changed."""
    other = V4StagesInputs(stage=inputs.stage, arguments={**arguments_of(inputs), **changes})
    return {name: array.copy() for name, array in TorchV4Stages("torch").run(other).arrays.items()}


def argument(name: str, change: Callable[[Any], Any]) -> Callable[[V4StagesInputs], dict]:
    return lambda inputs: by_torch(inputs, **{name: change(arguments_of(inputs)[name])})


def without_images(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    return by_torch(inputs, image_left=None, image_right=None)


def nobody_is_padding(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    starts, mapped = (
        arguments_of(inputs)["query_start_loc"],
        arguments_of(inputs)["slot_mapping"].copy(),
    )
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
    given = arguments_of(inputs)
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
    window, lengths = arguments_of(inputs)["window"], arguments_of(inputs)["seq_lens"].tolist()
    queries = np.diff(arguments_of(inputs)["query_start_loc"])
    prefixes = dict(zip(lengths, lengths - queries, strict=True))
    return one_token_at_a_time(
        inputs, lambda _, length: max(int(prefixes[length]) - window, 0), lambda pos, _: pos + 1
    )


def window_of_each_token(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    window = arguments_of(inputs)["window"]
    return one_token_at_a_time(
        inputs, lambda pos, _: max(pos - window, 0), lambda _, length: length
    )


def cache_with_scales(
    change: Callable[[np.ndarray], np.ndarray],
) -> Callable[[V4StagesInputs], dict[str, np.ndarray]]:
    """What torch_ref reads of a v3.2-fp8 cache whose scales are changed, token by token."""

    def wrong(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
        cache = arguments_of(inputs)["cache"].copy()
        for page in cache:
            for first in range(512, len(page), 656):
                page[first : first + 16] = change(page[first : first + 16].view("<f4")).view("u1")
        return by_torch(inputs, cache=cache)

    return wrong


def without_rope(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    found = by_torch(inputs)
    D = found["workspace"].shape[2]
    found["workspace"][:, :, D - 64 :] = arguments_of(inputs)["workspace"][:, :, D - 64 :]
    return found


def rounded_to_bfloat16(scales: np.ndarray) -> np.ndarray:
    bits = scales.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))
    return (bits & np.uint64(0xFFFF0000)).astype(np.uint32).view(np.float32)


def of_another_layout(**changes: Any) -> Callable[[V4StagesInputs], dict[str, np.ndarray]]:
    """What torch_ref writes with a format's other floor of amax."""

    def wrong(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
        name = str(arguments_of(inputs)["kv_format"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FORMATS, name, dataclasses.replace(FORMATS[name], **changes))
            return by_torch(inputs)

    return wrong


def exponents_rounded_down(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    def floor_of(amax: torch.Tensor, *, floor: float) -> torch.Tensor:
        return (torch.log2(amax.double().clamp(min=floor) / 448).floor() + 127).to(torch.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_ref.kv_cache.codec.ue8m0_bytes", floor_of)
        return by_torch(inputs)


def padding_bytes_left(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    found, before, page = by_torch(inputs), arguments_of(inputs)["cache"], 32
    for token in range(page):
        byte = page * 576 + 8 * token + 7
        found["cache"][:, byte] = before[:, byte]
    return found


def skipped_token_written(inputs: V4StagesInputs) -> dict[str, np.ndarray]:
    slots, cache = arguments_of(inputs)["slot_mapping"].copy(), arguments_of(inputs)["cache"]
    slots[slots < 0] += len(cache) * 32
    return by_torch(inputs, slot_mapping=slots)


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return rounded_to_bfloat16(values.copy())


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
    (QUANTISE, "exponent-rounded-down", exponents_rounded_down),
    (QUANTISE_V32, "exponent-rounded-down", exponents_rounded_down),
    (QUANTISE, "floor-missing", of_another_layout(amax_floor=1e-300)),
    (QUANTISE, "padding-byte-left", padding_bytes_left),
    (QUANTISE, "skipped-token-written", skipped_token_written),
    (QUANTISE, "rounded-twice", argument("values", in_bfloat16)),
    (QUANTISE_V32, "rounded-twice", argument("values", in_bfloat16)),
)


@pytest.mark.parametrize("case", [PAGED, C128, DSPARK, V32, WIDE, QUANTISE, QUANTISE_V32])
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


@pytest.mark.parametrize("kv_format", ["v4-fp8", "v3.2-fp8", "bf16", "bf16-576"])
def test_bytes_that_no_token_is_written_to_stay(kv_format: str) -> None:
    inputs = inputs_of(QUANTISE.replace("page=32,", f"page=32,format={kv_format},"))
    arrays = by_torch(inputs)
    assert judge(inputs, V4StagesResult(arrays=arrays)).status is Status.PASS
    used = set((arguments_of(inputs)["slot_mapping"] // 32).tolist())
    (page, *_) = set(range(len(arrays["cache"]))) - used
    arrays["cache"][page].view(np.uint8).reshape(-1)[5] ^= 1
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert [found.name for found in verdict.diagnosis] == ["touched-bytes"]
    assert "stood there and must stay" in verdict.reason
    arrays = by_torch(inputs)
    page, offset = divmod(int(arguments_of(inputs)["slot_mapping"].max()), 32)
    tokens = arrays["cache"].view(np.uint8).reshape(len(arrays["cache"]), -1)
    tokens[page, offset * {"v4-fp8": 576, "v3.2-fp8": 656, "bf16": 1024}.get(kv_format, 1152)] ^= 1
    verdict = judge(inputs, V4StagesResult(arrays=arrays))
    assert [found.name for found in verdict.diagnosis] == ["wrong-bytes"]
    token = int(np.argmax(arguments_of(inputs)["slot_mapping"]))
    assert f" is due, of token {token} " in verdict.reason


@pytest.mark.parametrize("kv_format", ["v4-fp8", "v3.2-fp8"])
def test_an_amax_of_448_times_a_power_of_two_may_have_twice_that_scale(kv_format: str) -> None:
    def raised(amax: torch.Tensor, *, floor: float) -> torch.Tensor:
        return (torch.floor(torch.log2(amax.double().clamp(min=floor) / 448)) + 128).to(torch.uint8)

    inputs = inputs_of(QUANTISE.replace("page=32,", f"page=32,format={kv_format},"))
    right = by_torch(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_ref.kv_cache.codec.ue8m0_bytes", raised)
        higher = by_torch(inputs)
    assert higher["cache"].tobytes() != right["cache"].tobytes()
    assert judge(inputs, V4StagesResult(arrays=higher)).status is Status.PASS
