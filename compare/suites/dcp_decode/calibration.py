"""What calibration draws of decode: random cases, models of right kernels, and faults.

Right kernels are `xla` as the registry has it, its ranks merged in float32, and models of kernels
that take other liberties, whose parts (ranges of keys, ranks) are rounded to bfloat16 and merged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from compare.houses.ranks import run_shards
from compare.judging.attention_call import SparsePrefillInputs
from compare.judging.calibration import Calibration, Drawn
from compare.judging.evidence import Evidence
from compare.judging.model_kernels import Freedom, run_in_ranges
from compare.judging.model_kernels import run as run_model
from compare.protocol.inputs import Result
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.facts import visible_keys
from compare.suites.dcp_decode.faults import faults_of
from compare.suites.dcp_decode.make import dcp_decode_inputs
from torch_ref import DecodeVariant

MODELS = {
    "one range": Freedom(),
    "shuffled blocks of 32, lazy rescale (2^8)": Freedom(block=32, order="shuffled", lazy=8.0),
    "truncated, fast math, P rounded twice": Freedom(
        truncates=True, fast_math=True, rounds_twice=True
    ),
}

SPLITS = (1, 16, 64)
"""Most keys of a range that a model splits a request into; 1 only where there are few keys."""

_LENS = (1, 2, 5, 17, 33, 64, 97, 130, 301)
_Q = (0, 1, 1, 2, 3, 4, 8)
_HEADS = (1, 2, 3, 6, 16)
_DATA = ("normal", "flat", "peaked", "exact")
_SCALES = ("auto", "auto", "auto", "auto", 1.0, 0.02, 0.0)


def random_cases(cases: int, shapes: int, seed: int) -> Iterator[Drawn]:
    """`cases` small random cases over `shapes` batches: one to three requests of up to 8 tokens,
    worlds of 1 to 8 with one rank or all, runs of 1 to 16, both dtypes of keys and queries, padded
    rows, stale tables, drafts, ranks and rows without keys.
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
            q_dtype="e4m3" if batch["kv"] == "e4m3" and rng.random() < 0.3 else "bf16",
            sm_scale="auto" if data == "exact" else one_of(_SCALES),
            seed=int(rng.integers(1 << 32)),
        )
        try:
            case.check()
        except ValueError:
            continue  # exact data needs as many keys as ranks
        made += 1
        yield str(case), tuple(batch.items()), dcp_decode_inputs(case)


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
        plain = _as_prefill(one)
        split = model.split if plain.indices.shape[1] > model.split else 0
        if split:
            result = run_in_ranges(plain, split, model.freedom, rng)
        else:
            result = run_model(plain, model.freedom, rng)
        lse = np.where(np.isposinf(result.lse), np.float32(-np.inf), result.lse)
        return DcpDecodeResult(out=result.out, lse=lse, parts="bfloat16" if split else "float32")

    return run_shards(call, inputs) if inputs.shards else call(inputs)


def _as_prefill(inputs: DcpDecodeInputs) -> SparsePrefillInputs:
    """One sparse prefill whose slots are the keys that each row sees."""
    request, keys = visible_keys(inputs)
    P, most = inputs.kv_cache.shape[1], max(1, int(keys.max(initial=0)))
    place = np.arange(most)
    last = inputs.block_table.shape[1] - 1
    pages = inputs.block_table[np.maximum(request, 0)[:, None], np.minimum(place // P, last)]
    return SparsePrefillInputs(
        q=inputs.q,
        kv=inputs.kv_cache.reshape(-1, inputs.kv_cache.shape[2]),
        indices=np.where(place < keys[:, None], pages * P + place % P, -1).astype(np.int32),
        sm_scale=inputs.sm_scale,
    )


def keys_per_range(inputs: DcpDecodeInputs, rng: np.random.Generator) -> int:
    """A split that gives at most 32 ranges."""
    most = max(len_ for call in (inputs.shards or (inputs,)) for len_ in [*call.seq_lens, 1])
    fits = [split for split in SPLITS if math.ceil(most / split) <= 32]
    return int(fits[int(rng.integers(len(fits)))])


def _run(evidence: Evidence[Any], rng: np.random.Generator) -> tuple[str, Result] | None:
    """A model of a right kernel; they take bfloat16 keys only."""
    inputs: DcpDecodeInputs = evidence.inputs
    if inputs.kv_scale is not None:
        return None
    name = list(MODELS)[int(rng.integers(len(MODELS)))]
    split = keys_per_range(inputs, rng) if rng.random() < 0.5 else 0
    result = run(inputs, Splitting(freedom=MODELS[name], split=split), rng)
    if inputs.shards:
        name = "ranks in bfloat16"
    elif result.parts == "bfloat16":
        name = "ranges in bfloat16"
    return name, result


CALIBRATION = Calibration(
    cases=random_cases,
    models=(*MODELS, "ranges in bfloat16", "ranks in bfloat16"),
    run=_run,
    faults=faults_of,
    # Of merged ranks the contract comes by the same merge.
    contract=lambda sample, _: sample.evidence.oracle(sample.tokens, DecodeVariant()),
    result=lambda tensors: DcpDecodeResult(out=tensors["out"], lse=tensors["lse"]),
    statistics=("lse",),
)
