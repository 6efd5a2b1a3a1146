from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compare.cases.inputs import SparsePrefillInputs
from compare.run.result import PlanResult, SparsePrefillResult
from compare.run.transfer import fingerprint, pack, unpack
from compare.suites import make_inputs, parse_case

CASE = "sparse-prefill:s_q=3,s_kv=40,h=4,sink=mixed,length=ragged,strided=1"


def made(line: str = CASE) -> SparsePrefillInputs:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, SparsePrefillInputs)
    return inputs


def test_inputs_arrive_with_dtypes_strides_and_bits_and_leave_no_file(tmp_path: Path) -> None:
    inputs = made()
    arrived = unpack(pickle.loads(pickle.dumps(pack(inputs, tmp_path))))
    for name in ("q", "kv", "indices", "attn_sink", "topk_length"):
        sent, got = getattr(inputs, name), getattr(arrived, name)
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert got.strides == sent.strides
        assert got.tobytes() == sent.tobytes()
    assert arrived.sha256() == inputs.sha256()
    assert not inputs.q.flags.c_contiguous
    assert list(tmp_path.iterdir()) == []


def test_a_result_arrives_whatever_its_dtypes_and_an_empty_one_too(tmp_path: Path) -> None:
    for shape in ((3, 2, 512), (0, 2, 512)):
        result = SparsePrefillResult(
            out=np.full(shape, 1.5, ml_dtypes.bfloat16), lse=np.zeros(shape[:2], np.float64)
        )
        arrived = unpack(pack(result, tmp_path))
        assert arrived.out.dtype == ml_dtypes.bfloat16 and arrived.out.shape == shape
        assert (arrived.out == 1.5).all()
        assert arrived.lse.dtype == np.float64 and arrived.max_logits is None


def test_a_write_to_an_arrived_array_is_this_process_own(tmp_path: Path) -> None:
    packed = pack(SparsePrefillResult(out=np.ones(4), lse=np.ones(1)), tmp_path)
    arrived = unpack(packed)
    arrived.out[0] = 7
    assert arrived.out.tolist() == [7, 1, 1, 1]


def test_a_plan_needs_no_file(tmp_path: Path) -> None:
    assert pack(PlanResult(chunks=()), tmp_path) == PlanResult(chunks=())


@pytest.mark.parametrize("name", ["q", "kv", "indices", "attn_sink", "topk_length"])
def test_the_fingerprint_sees_each_argument(name: str) -> None:
    inputs = made()
    other = np.array(getattr(inputs, name), copy=True)
    other[0] = 1
    changed = dataclasses.replace(inputs, **{name: other})
    assert fingerprint(made()) == fingerprint(inputs) != fingerprint(changed)


def test_the_fingerprint_sees_the_scale_and_the_chunks() -> None:
    inputs = made()
    for change in ({"sm_scale": 1.0}, {"chunks": ((0, 3),)}, {"topk_length": None}):
        assert fingerprint(dataclasses.replace(inputs, **change)) != fingerprint(inputs)
