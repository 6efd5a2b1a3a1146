"""The random decode cases that the judge's bounds are measured on, right kernels modelled on them,
and the faults planted into them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from compare.calibrate.model_kernels import Freedom
from compare.calibrate.model_kernels import run as run_model
from compare.houses.ranks import merge_by_torch, run_shards
from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.device import to_numpy
from compare.judging.elements import round_to_bfloat16
from compare.judging.evidence import Evidence
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.facts import visible_keys

SPLITS = (1, 16, 64)
"""Most keys of a range that a model splits a request into; 1 only where there are few keys."""

_LENS = (1, 2, 5, 17, 33, 64, 97, 130, 301)
_Q = (0, 1, 1, 2, 3, 4, 8)
_HEADS = (1, 2, 3, 6, 16)
_DATA = ("normal", "flat", "peaked", "exact")
_SCALES = ("auto", "auto", "auto", "auto", 1.0, 0.02, 0.0)


def random_cases(cases: int, shapes: int, seed: int) -> Iterator[DcpDecodeCase]:
    """`cases` small random cases over `shapes` batches: one to three requests of up to 8 tokens,
    worlds of 1 to 8 with one rank or all, runs of 1 to 16, both dtypes of keys, padded rows, stale
    tables, drafts, ranks and rows without keys.
    """
    rng = np.random.default_rng(seed)

    def one_of(values):
        return values[int(rng.integers(len(values)))]

    batches = []
    for _ in range(shapes):
        requests = int(rng.integers(1, 4))
        batches.append(
            {
                "lens": tuple(one_of(_LENS) for _ in range(requests)),
                "q": tuple(one_of(_Q) for _ in range(requests)),
                "h": one_of(_HEADS),
                "page": one_of((32, 64)),
                "kv": one_of(("bf16", "bf16", "e4m3")),
                "pad_rows": one_of((0, 0, 2)),
            }
        )
    made = 0
    while made < cases:
        batch, data, world = one_of(batches), one_of(_DATA), one_of((1, 2, 2, 4, 8))
        case = DcpDecodeCase(
            **batch,
            world=world,
            rank="all" if rng.random() < 0.4 else int(rng.integers(world)),
            interleave=one_of((1, 1, 4, 16)),
            causal=bool(rng.random() < 0.9),
            stale=bool(rng.random() < 0.3),
            data=data,
            sm_scale="auto" if data == "exact" else one_of(_SCALES),
            seed=int(rng.integers(1 << 32)),
        )
        try:
            case.check()
        except ValueError:
            continue  # exact data needs as many keys as ranks
        made += 1
        yield case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splitting:
    """A right decode kernel: how it computes one range of keys, and how many keys a range has at
    most (0: one range). The ranges' results are rounded to bfloat16 before they are merged.
    """

    freedom: Freedom
    split: int = 0


def run(inputs: DcpDecodeInputs, model: Splitting, rng: np.random.Generator) -> DcpDecodeResult:
    """Decode as such a kernel computes it, on every rank where ranks are merged. bf16 keys only."""

    def call(one: DcpDecodeInputs) -> DcpDecodeResult:
        ranges = [run_model(part, model.freedom, rng) for part in _ranges(one, model.split)]
        lses = [np.where(np.isposinf(part.lse), -np.inf, part.lse) for part in ranges]
        if len(ranges) == 1:
            return DcpDecodeResult(out=ranges[0].out, lse=lses[0].astype(np.float32))
        out, lse = merge_by_torch([part.out for part in ranges], lses)
        return DcpDecodeResult(out=out.astype(ml_dtypes.bfloat16), lse=lse, parts="bfloat16")

    return run_shards(call, inputs) if inputs.shards else call(inputs)


def _ranges(inputs: DcpDecodeInputs, split: int) -> Iterator[SparsePrefillInputs]:
    """One sparse prefill for each range of keys: its slots are those that the row sees there."""
    request, keys = visible_keys(inputs)
    P, most = inputs.kv_cache.shape[1], max(1, int(keys.max(initial=0)))
    kv = inputs.kv_cache.reshape(-1, inputs.kv_cache.shape[2])
    place = np.arange(most)
    pages = inputs.block_table[
        np.maximum(request, 0)[:, None], np.minimum(place // P, _last(inputs))
    ]
    indices = np.where(place < keys[:, None], pages * P + place % P, -1).astype(np.int32)
    step = split or most
    for start in range(0, most, step):
        yield SparsePrefillInputs(
            q=inputs.q, kv=kv, indices=indices[:, start : start + step], sm_scale=inputs.sm_scale
        )


def _last(inputs: DcpDecodeInputs) -> int:
    return inputs.block_table.shape[1] - 1


def faults(inputs: DcpDecodeInputs) -> dict[str, dict]:
    """The faults that can happen with these inputs, as fields of DecodeVariant, by slug."""
    calls = inputs.shards or (inputs,)
    found: dict[str, dict] = {
        "all-rows-at-total": {"bound": "total"},
        "bound-off-by-one": {"bound": "plus_one"},
        "bound-off-by-one (short)": {"bound": "minus_one"},
        "localised-before-expanding": {"bound": "after_localising"},
        "viewed-as-uniform": {"view": "uniform"},
        "neighbour-request": {"request_shift": 1},
        "scale-twice": {"scale_power": 2},
        "wrong-value-columns": {"v_offset": 64},
        "heads-rotated": {"head_shift": 1},
        "lse-base-2": {"lse_base2": True},
        "lse-layout-reshaped": {"lse_layout": "reshaped"},
        "empty-rank-lse-zero": {"empty_lse": "0"},
    }
    if calls[0].interleave > 1:
        found["interleave-ignored"] = {"mask_interleave": 1}
    if inputs.kv_scale is not None:
        found["kv-scale-ignored"] = {"kv_scale": "ignored"}
    if not inputs.shards and inputs.dcp_world > 1:
        found["wrong-rank-mask"] = {"mask_rank": (inputs.dcp_rank + 1) % inputs.dcp_world}
    return found


def with_fault(evidence: Evidence, fields: dict) -> DcpDecodeResult | None:
    """What a kernel with this fault and no rounding but the last would give; None where that is
    what the contract gives too, bit for bit: the inputs can't show the fault.
    """
    from torch_ref import DecodeVariant

    tokens = np.arange(evidence.num_tokens)
    # Of merged ranks the contract comes by the same merge: the whole differs in its last bits.
    right, wrong = (evidence.oracle(tokens, DecodeVariant(**each)) for each in ({}, fields))
    results = [(_bfloat16(rows.out), rows.lse.astype(np.float32)) for rows in (right, wrong)]
    (out, lse), (wrong_out, wrong_lse) = results
    same_out = np.array_equal(out.astype(np.float32), wrong_out.astype(np.float32), equal_nan=True)
    if same_out and np.array_equal(lse, wrong_lse, equal_nan=True):
        return None
    return DcpDecodeResult(out=wrong_out, lse=wrong_lse)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    import torch

    return to_numpy(round_to_bfloat16(torch.from_numpy(np.ascontiguousarray(values))))


def keys_per_range(inputs: DcpDecodeInputs, rng: np.random.Generator) -> int:
    """A split that gives at most 32 ranges."""
    most = max(len_ for call in (inputs.shards or (inputs,)) for len_ in [*call.seq_lens, 1])
    fits = [split for split in SPLITS if math.ceil(most / split) <= 32]
    return int(fits[int(rng.integers(len(fits)))])
