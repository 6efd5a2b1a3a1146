from __future__ import annotations

import dataclasses
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compare.isolation.transfer import fingerprint, pack, receive, send
from compare.judging.attention_call import SparsePrefillInputs, SparsePrefillResult
from compare.judging.plans import PlanResult
from compare.suites.dcp_decode.call import DcpDecodeInputs
from compare.suites.table import make_inputs, parse_case

CASE = "sparse-prefill:s_q=3,s_kv=40,h=4,sink=mixed,length=ragged,strided=1"


def made(line: str = CASE) -> SparsePrefillInputs:
    inputs = make_inputs(parse_case(line))
    assert isinstance(inputs, SparsePrefillInputs)
    return inputs


def carried(value: Any) -> Any:
    """`value` after its way from one end of a connection to the other."""
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    with ours, theirs:
        send(ours, ("before", pack(value), 3))
        before, arrived, after = receive(theirs)
    assert (before, after) == ("before", 3)
    return arrived


def test_inputs_arrive_with_dtypes_strides_and_bits() -> None:
    inputs = made()
    arrived = carried(inputs)
    for name in ("q", "kv", "indices", "attn_sink", "topk_length"):
        sent, got = getattr(inputs, name), getattr(arrived, name)
        assert got.dtype == sent.dtype and got.shape == sent.shape
        assert got.strides == sent.strides
        assert got.tobytes() == sent.tobytes()
    assert arrived.sha256() == inputs.sha256()
    assert not inputs.q.flags.c_contiguous


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_result_arrives_whatever_its_dtypes_and_an_empty_one_too(
    in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:  # as on a system without nameless files in memory
        monkeypatch.delattr(os, "memfd_create", raising=False)
    for shape in ((3, 2, 512), (0, 2, 512)):
        result = SparsePrefillResult(
            out=np.full(shape, 1.5, ml_dtypes.bfloat16), lse=np.zeros(shape[:2], np.float64)
        )
        arrived = carried(result)
        assert arrived.out.dtype == ml_dtypes.bfloat16 and arrived.out.shape == shape
        assert (arrived.out == 1.5).all()
        assert arrived.lse.dtype == np.float64 and arrived.max_logits is None


def test_two_in_one_message_keep_their_arrays_apart() -> None:
    first, second = (SparsePrefillResult(out=np.full(4, n), lse=np.ones(1)) for n in (1, 2))
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    with ours, theirs:
        send(ours, (pack(first), pack(second)))
        arrived = receive(theirs)
    assert [result.out.tolist() for result in arrived] == [[1] * 4, [2] * 4]


def test_a_write_to_an_arrived_array_is_this_process_own() -> None:
    arrived = carried(SparsePrefillResult(out=np.ones(4), lse=np.ones(1)))
    arrived.out[0] = 7
    assert arrived.out.tolist() == [7, 1, 1, 1]


def test_a_plan_needs_no_file() -> None:
    assert carried(PlanResult(chunks=())) == PlanResult(chunks=())


def test_nothing_stays_open() -> None:
    def open_files() -> int:
        return len(os.listdir("/dev/fd"))

    result = SparsePrefillResult(out=np.ones(4), lse=np.ones(1))
    carried(result)
    before = open_files()
    for _ in range(5):
        carried(result)
    assert open_files() == before


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


SHARDED = "dcp-decode:lens=40+3,q=2+1,h=2,page=32,world=4,rank=all"


def test_shards_arrive_with_their_arrays() -> None:
    inputs = make_inputs(parse_case(SHARDED))
    arrived = carried(inputs)
    assert arrived.sha256() == inputs.sha256()
    assert [shard.dcp_rank for shard in arrived.shards] == [0, 1, 2, 3]
    assert arrived.shards[3].kv_cache.dtype == ml_dtypes.bfloat16


def test_more_files_than_one_message_takes_arrive_in_order() -> None:
    inputs = make_inputs(parse_case("dcp-decode:lens=9,q=1,h=1,page=1,world=45,rank=all"))
    assert carried(inputs).sha256() == inputs.sha256()


def test_the_fingerprint_sees_what_a_shard_holds() -> None:
    inputs = make_inputs(parse_case(SHARDED))
    before = fingerprint(inputs)
    assert fingerprint(make_inputs(parse_case(SHARDED))) == before
    assert isinstance(inputs, DcpDecodeInputs) and inputs.shards is not None
    inputs.shards[2].seq_lens[0] += 1
    assert fingerprint(inputs) != before
