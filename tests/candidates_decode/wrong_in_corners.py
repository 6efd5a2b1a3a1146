"""Wrong in one of many ways, each at a corner of what a call may be.

FAULTS: by name a function of the call's arguments that gives (out, lse).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from right_decode import decode, keys_below, rows_of


def _ragged(q_lens):
    return len({queries for queries in q_lens if queries}) > 1


def _q_lens(call):
    starts = call["query_start_loc"].tolist()
    return [end - start for start, end in pairwise(starts)]


def _counts(call, change=lambda count: count, *, held=True):
    """The right number of keys, changed; without `held` what seq_lens says is ignored."""

    def count(request, bound):
        own = keys_below(bound, call["dcp_rank"], call["dcp_world"], call["interleave"])
        return change(min(own, int(call["seq_lens"][request])) if held else own)

    return count


def _but(call, **more):
    return decode(**call | more)


def _twice_where(call, there):
    out, lse = decode(**call)
    return (out * 2, lse) if there else (out, lse)


def _float8(call, there):
    return _twice_where(call, call["kv_scale"] is not None and there)


def _rounded_scale(call, dtype):
    scale = call["kv_scale"]
    return _but(call, kv_scale=scale and float(torch.tensor(scale).to(dtype)))


def _rows_past_the_eighth(call):
    starts = call["query_start_loc"].tolist()
    rows = rows_of(call["query_start_loc"], call["total_lens"], call["causal"])
    return [(t, b, bound - max(0, t - starts[b] - 7)) for t, b, bound in rows]


def _nan_hidden(call, *, out_too=True, lse_too=True):
    out, lse = decode(**call)
    return (
        out.nan_to_num(0.0) if out_too else out,
        torch.where(lse.isnan(), 0.0, lse) if lse_too else lse,
    )


def _nan_key_skipped(call):
    """Keys with a NaN are taken as zeros."""
    kv = call["kv_cache"].float().nan_to_num(0.0).to(call["kv_cache"].dtype)
    return _but(call, kv_cache=kv)


FAULTS = {
    "ragged_draft_is_causal": lambda c: _but(c, causal=c["causal"] or _ragged(_q_lens(c))),
    "draft_in_runs_is_causal": lambda c: _but(c, causal=c["causal"] or c["interleave"] > 1),
    "tokens_past_the_eighth": lambda c: _but(c, rows=_rows_past_the_eighth(c)),
    "seq_lens_ignored": lambda c: _but(c, counts=_counts(c, held=False)),
    "other_worlds": lambda c: _but(
        c, counts=_counts(c, lambda n: max(n - (c["dcp_world"] not in (1, 2, 4, 8)), 0))
    ),
    "last_of_1024": lambda c: _but(c, counts=_counts(c, lambda n: n - (n > 0 and n % 1024 == 0))),
    "past_600_of_4_ranks": lambda c: _but(
        c,
        counts=_counts(
            c, lambda n: min(n, 600) if (c["dcp_world"], c["interleave"]) == (4, 1) else n
        ),
    ),
    "past_3000": lambda c: _but(c, counts=_counts(c, lambda n: min(n, 3000))),
    "scale_in_float8": lambda c: _rounded_scale(c, torch.float8_e4m3fn),
    "scale_in_bfloat16": lambda c: _rounded_scale(c, torch.bfloat16),
    "float8_on_other_pages": lambda c: _float8(c, c["kv_cache"].shape[1] != 64),
    "float8_on_one_rank": lambda c: _float8(c, c["dcp_world"] == 1),
    "float8_draft": lambda c: _float8(c, not c["causal"]),
    "float8_many_heads": lambda c: _float8(c, c["q"].shape[1] > 64),
    "nan_hidden": _nan_hidden,
    "nan_hidden_in_out": lambda c: _nan_hidden(c, lse_too=False),
    "nan_hidden_in_lse": lambda c: _nan_hidden(c, out_too=False),
    "nan_key_skipped": _nan_key_skipped,
    "nan_query_skipped": lambda c: _but(c, q=c["q"].float().nan_to_num(0.0).to(c["q"].dtype)),
    "scale_without_its_sign": lambda c: _but(c, sm_scale=abs(c["sm_scale"])),
    "scale_of_zero_is_default": lambda c: _but(c, sm_scale=c["sm_scale"] or 576**-0.5),
}


def wrong(fault, **call):
    return FAULTS[fault](call)
