"""Known deviations from the V4 prefill path: the keys that a token is given instead of its own.

A deviation is told as a plain sparse prefill again, so that the oracle computes it: which keys of
which request each token attends to, and what is read for them. Some faults are made where keys are
read (`cache`: no workspace in between), others in the rows of a chunk's workspace, where a row that
belongs to another request, or to none, stands beside the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from torch_ref.v4.flat import FlatCall
from torch_ref.v4.inputs import V4Inputs
from torch_ref.v4.misreading import Reading, read_keys

Through = Literal["workspace", "cache"]

COMPRESSED, WINDOW, NOTHING = 0, 1, 2
"""The first column of a key; the others are its request and its entry or position."""

_WIDTH_MULTIPLE = 128
_NUMBERS = 2**30  # entries and positions lie well within half of it, negative ones too


class Chunk(Protocol):
    """A chunk of a plan, whoever made it; see torch_ref.planning.PrefillChunk."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def compressed_rows(self) -> int: ...
    @property
    def workspace_rows(self) -> int: ...
    @property
    def query_start(self) -> int: ...
    @property
    def query_end(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class V4Variant:
    """One deviation, or several; the default is the contract.

    window_shift   this many positions more at the old end of a token's window
    ahead          this many positions more behind the token's own
    lengths        prefix: a request's context is counted without this step's tokens
    image          ignored: tokens of an image see their window alone
    entries        left_out; late: pos // ratio of them; uncut: the whole row of topk_indices,
                   its -1 included (a row before the request's own)
    entries_of     whose entries are listed: the request's, or a neighbour's
    window_keys    left_out
    request        whose rows or block tables are used: the request's own; those of the chunk's
                   first request (the base M * b is missing); the base counted twice; a neighbour's
    offset         of the window's rows, N: missing, or counted twice
    position_shift each gathered position is this far from the right one; "queries": as far before
                   it as its request has tokens in this step
    empty_slots    last_row: the -1 behind a list are attended to as the workspace's last row
    reading        how a stored token is misread; see torch_ref.v4.misreading
    """

    window_shift: int = 0
    ahead: int = 0
    lengths: Literal["right", "prefix"] = "right"
    image: Literal["right", "ignored"] = "right"
    entries: Literal["right", "left_out", "late", "uncut"] = "right"
    entries_of: Literal["right", "next", "previous"] = "right"
    window_keys: Literal["right", "left_out"] = "right"
    request: Literal["right", "first", "doubled", "next", "previous"] = "right"
    offset: Literal["right", "missing", "doubled"] = "right"
    position_shift: int | Literal["queries"] = 0
    empty_slots: Literal["right", "last_row"] = "right"
    reading: Reading = "right"

    def possible(self, through: Through) -> bool:
        """Whether the deviation is one of that way to the keys."""
        rows_alone = (
            self.request == "doubled"
            or self.offset != "right"
            or self.entries == "uncut"
            or self.empty_slots != "right"
        )
        gather_alone = self.position_shift != 0 or self.reading != "right"
        return not rows_alone if through == "cache" else not gather_alone


RIGHT = V4Variant()

_STEPS = {"right": 0, "next": 1, "previous": -1}


class VariantCall(NamedTuple):
    """A sparse prefill with a deviation, and the tokens for which it can't be told, bool [t].

    They look at workspace rows that nothing was gathered to, or at places that don't exist.
    """

    call: FlatCall
    unknown: Bool[Tensor, " t"]


def variant_call(
    inputs: V4Inputs,
    variant: V4Variant,
    plan: Sequence[Chunk],
    tokens: Sequence[int],
    *,
    through: Through,
) -> VariantCall:
    """Gives the sparse prefill of these tokens, in this order, with the deviation.

    through says where the deviation is made, and has to be possible for it. plan holds every token.
    """
    lists = [variant_keys(inputs, variant, plan, t, through=through) for t in tokens]
    keys, row = _distinct(torch.cat([*lists, torch.zeros(0, 3, dtype=torch.long)]))
    kv, there = read_keys(inputs, keys, variant.reading)
    lengths = torch.tensor([len(listed) for listed in lists], dtype=torch.int32)
    indices = torch.full((len(lists), max((*map(len, lists), 0))), -1, dtype=torch.int32)
    unknown = torch.zeros(len(lists), dtype=torch.bool)
    for i, rows in enumerate(row.split(lengths.tolist())):
        indices[i, : len(rows)] = rows
        unknown[i] = not there[rows].all()
    device = inputs.q.device
    return VariantCall(FlatCall(kv, indices.to(device), lengths.to(device)), unknown)


def variant_keys(
    inputs: V4Inputs,
    variant: V4Variant,
    plan: Sequence[Chunk],
    token: int,
    *,
    through: Through,
) -> Int64[Tensor, "k 3"]:
    """Lists the keys that a token attends to: kind, request, and entry or position.

    Kind NOTHING is a workspace row that nothing is gathered to; rows outside the workspace name no
    key.
    """
    chunk = chunk_of(plan, token)
    if through == "workspace":
        return keys_of_rows(inputs, chunk, workspace_rows(inputs, variant, chunk, token))
    own = int(inputs.batch.request[token])
    entries, first, end = _seen(inputs, variant, token)
    listed = _listed(inputs, token, entries)
    positions = torch.arange(first, max(first, end))
    if variant.window_keys == "left_out":
        positions = positions[:0]
    request = own + _STEPS[variant.entries_of]
    keys = torch.cat([_keys(COMPRESSED, request, listed), _keys(WINDOW, own, positions)])
    return gathered_keys(inputs, variant, keys, chunk)


def gathered_keys(
    inputs: V4Inputs, variant: V4Variant, keys: Int64[Tensor, "k 3"], chunk: Chunk
) -> Int64[Tensor, "k 3"]:
    """Lists what is read in the place of these keys, if the deviation is one of the gather's."""
    keys = keys.clone()
    window = keys[:, 0] == WINDOW
    if variant.position_shift == "queries":
        queries = torch.tensor((*inputs.batch.query_lens, 0))
        keys[window, 2] -= queries[keys[window, 1]]
    else:
        keys[window, 2] += variant.position_shift
    if variant.request == "first":
        keys[:, 1] = chunk.start
    elif variant.request != "right":
        keys[:, 1] = keys[:, 1] + _STEPS[variant.request]
    keys[:, 1] %= max(len(inputs.batch.seq_lens), 1)
    return keys


def workspace_rows(
    inputs: V4Inputs, variant: V4Variant, chunk: Chunk, token: int
) -> Int64[Tensor, " k"]:
    """Lists the rows of a chunk's workspace, as [requests * M, 512], that a token attends to.

    Some may lie outside of it.
    """
    batch = inputs.batch
    own = int(batch.request[token])
    M, N, b = chunk.workspace_rows, chunk.compressed_rows, own - chunk.start
    base = M * {"first": 0, "doubled": 2 * b}.get(
        variant.request, b + _STEPS.get(variant.request, 0)
    )
    entries, first, end = _seen(inputs, variant, token)
    listed = base + M * _STEPS[variant.entries_of] + _listed(inputs, token, entries)
    offset = N * {"right": 1, "missing": 0, "doubled": 2}[variant.offset]
    oldest = batch.seq_lens[own] - gathered_positions(inputs, own)
    window = base + offset + torch.arange(first, max(first, end)) - oldest
    if variant.window_keys == "left_out":
        window = window[:0]
    rows = torch.cat([listed, window])
    if variant.empty_slots == "last_row":
        columns = inputs.topk + inputs.window + inputs.max_image_tokens
        width = -(-columns // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        last = (chunk.end - chunk.start) * M - 1
        rows = torch.cat([rows, rows.new_full((max(width - len(rows), 0),), last)])
    return rows


def keys_of_rows(inputs: V4Inputs, chunk: Chunk, rows: Int64[Tensor, " k"]) -> Int64[Tensor, "k 3"]:
    """Lists what is gathered to rows of a chunk's workspace, without rows outside of it."""
    M, N = chunk.workspace_rows, chunk.compressed_rows
    rows = rows[(rows >= 0) & (rows < (chunk.end - chunk.start) * M)]
    request, row = chunk.start + rows // max(M, 1), rows % max(M, 1)
    n = len(inputs.batch.seq_lens)
    compressed = torch.tensor((*inputs.compressed_lens, 0))[request]
    gathered = torch.tensor([*(gathered_positions(inputs, i) for i in range(n)), 0])[request]
    lengths = torch.tensor((*inputs.batch.seq_lens, 0))[request]
    entry, window = row < compressed, (row >= N) & (row < N + gathered)
    kind = torch.where(entry, COMPRESSED, torch.where(window, WINDOW, NOTHING))
    number = torch.where(entry, row, lengths - gathered + row - N)
    return torch.stack([kind, request, number], dim=1)


def gathered_positions(inputs: V4Inputs, request: int) -> int:
    """How many positions of a request are gathered, its last ones."""
    queries, length = inputs.batch.query_lens[request], inputs.batch.seq_lens[request]
    return queries + min(length - queries, inputs.window - 1)


def chunk_of(plan: Sequence[Chunk], token: int) -> Chunk:
    """The chunk that holds a token; ValueError where there is none."""
    for chunk in plan:
        if chunk.query_start <= token < chunk.query_end:
            return chunk
    raise ValueError(f"plan: no chunk holds token {token}")


def _seen(inputs: V4Inputs, variant: V4Variant, token: int) -> tuple[int | None, int, int]:
    """Says how many entries of its list a token takes, and its positions [first, end).

    None instead of a number of entries is the whole row.
    """
    batch = inputs.batch
    position = int(batch.position[token])
    left = right = 0
    if inputs.image_left is not None and inputs.image_right is not None:
        left, right = int(inputs.image_left[token]), int(inputs.image_right[token])
    if variant.lengths == "prefix":
        position -= batch.query_lens[int(batch.request[token])]
    if variant.image == "ignored":
        left = right = 0
    back = max(inputs.window - 1 + variant.window_shift, left)
    first, end = max(position - back, 0), position + right + 1 + variant.ahead
    if variant.entries == "uncut":
        return None, first, end
    if variant.entries == "left_out":
        return 0, first, end
    counted = position if variant.entries == "late" else position + 1
    return min(max(counted, 0) // inputs.compress_ratio, inputs.topk), first, end


def _listed(inputs: V4Inputs, token: int, entries: int | None) -> Int64[Tensor, " k"]:
    if inputs.topk_indices is None:
        return torch.zeros(0, dtype=torch.long)
    return inputs.topk_indices[token, :entries].cpu().long()


def _distinct(keys: Int64[Tensor, "k 3"]) -> tuple[Int64[Tensor, "m 3"], Int64[Tensor, " k"]]:
    """Lists each key once, and where among those each of `keys` is.

    A key is sorted as one number: torch sorts rows much slower.
    """
    high, low = keys[:, 0] << 31 | keys[:, 1], keys[:, 2] + _NUMBERS // 2
    code, row = torch.unique(high * _NUMBERS + low, return_inverse=True)
    high, low = code // _NUMBERS, code % _NUMBERS - _NUMBERS // 2
    return torch.stack([high >> 31, high & (2**31 - 1), low], dim=1), row


def _keys(kind: int, request: int, numbers: Int64[Tensor, " k"]) -> Int64[Tensor, "k 3"]:
    return torch.stack(
        [torch.full_like(numbers, kind), torch.full_like(numbers, request), numbers], dim=1
    )
