"""A decode batch as a CUDA kernel is to see it, and the way back to the rows of q.

A kernel that masks with a triangle of its own, k < length - (q_len - 1 - j), may be given whole
requests only where that is what the plan says: with one rank. On a shard it would be wrong for
every token but the last, so each token becomes a request of one token with its own key count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from torch_ref.decode import DecodeResult
from torch_ref.decode.inputs import VALUE_WIDTH, DecodeInputs


@dataclass(frozen=True, eq=False)
class KernelBatch:
    """What a kernel is given: b requests whose query_lens add up to q's rows, padding left out.

    A token of a causal request of s tokens and n keys sees the first n - (s - 1 - j) of them, one
    of a non-causal request all n. Notes say what was changed for the kernel.
    """

    q: Float[Tensor, "R H D"]
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    block_table: Int32[Tensor, "b M"]
    causal: bool
    notes: tuple[str, ...]

    @property
    def uniform_query_len(self) -> int | None:
        """The one query length of all requests, None if they differ."""
        return self.query_lens[0] if len(set(self.query_lens)) == 1 else None

    def int32(self, values: tuple[int, ...] | list[int]) -> Int32[Tensor, " n"]:
        """Numbers as the kernel takes them, on q's device."""
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)


@dataclass(frozen=True, eq=False)
class PreparedDecode:
    """A kernel call whose inputs are laid out and planned: launch it as often as wanted.

    launch gives the kernel's own out and lse, finish turns them into rows of q with natural-log lse
    and -inf for empty rows; notes say in sentences what was changed on the way in, and
    finish_notes, given the same, what was read differently on the way out.
    """

    launch: Callable[[], tuple[Tensor, Tensor]]
    finish: Callable[[tuple[Tensor, Tensor]], DecodeResult]
    notes: tuple[str, ...]
    finish_notes: Callable[[tuple[Tensor, Tensor]], tuple[str, ...]] = lambda raw: ()

    def run(self) -> tuple[DecodeResult, tuple[str, ...]]:
        """One launch, its result and everything that was changed for it."""
        raw = self.launch()
        return self.finish(raw), (*self.notes, *self.finish_notes(raw))


def whole_requests(inputs: DecodeInputs) -> KernelBatch:
    """The batch as it stands, requests without tokens and padded rows left out."""
    kept = [b for b, count in enumerate(inputs.query_lens) if count]
    notes = _padding_note(inputs)
    idle = len(inputs.query_lens) - len(kept)
    if idle:
        notes.append(f"{idle} requests without query tokens left out")
    return KernelBatch(
        q=_rows(inputs, notes),
        query_lens=tuple(inputs.query_lens[b] for b in kept),
        key_lens=tuple(inputs.seq_lens[b] for b in kept),
        block_table=_table(inputs, kept),
        causal=inputs.causal,
        notes=tuple(notes),
    )


def single_tokens(inputs: DecodeInputs) -> KernelBatch:
    """One request per token, with its own key count and a copy of its request's block table."""
    real = inputs.query_start_loc[-1]
    notes = _padding_note(inputs)
    if any(count > 1 for count in inputs.query_lens):
        notes.append(f"flattened to {real} rows of one query token, each with its own key count")
    return KernelBatch(
        q=_rows(inputs, notes),
        query_lens=(1,) * real,
        key_lens=inputs.key_counts[:real],
        block_table=_table(inputs, list(inputs.rows.request[:real])),
        causal=False,
        notes=tuple(notes),
    )


def why_not_whole(inputs: DecodeInputs) -> str | None:
    """None if whole requests under a kernel's own triangle are right, else the reason."""
    if inputs.dcp_world > 1:
        return "a kernel's own causal triangle is wrong on a shard"
    for b, (start, end) in enumerate(pairwise(inputs.query_start_loc)):
        for t in range(start, end):
            later = end - 1 - t if inputs.causal else 0
            if inputs.key_counts[t] != max(inputs.seq_lens[b] - later, 0):
                return f"request {b} has {inputs.seq_lens[b]} of {inputs.total_lens[b]} keys"
    return None


def back_to_rows(inputs: DecodeInputs, out: Tensor, lse: Tensor) -> DecodeResult:
    """out [R, H, 512] and lse [R, H] of the real rows, with padded rows as out 0 and lse -inf."""
    real, padded = inputs.query_start_loc[-1], inputs.tokens - inputs.query_start_loc[-1]
    if padded:
        out = torch.cat([out[:real], out.new_zeros(padded, inputs.heads, VALUE_WIDTH)])
        lse = torch.cat([lse[:real], lse.new_full((padded, inputs.heads), -math.inf)])
    return DecodeResult(out, lse)


def without_a_launch(inputs: DecodeInputs) -> PreparedDecode:
    """For a batch without query tokens: kernels refuse it, and there is nothing to be done."""

    def launch() -> tuple[Tensor, Tensor]:
        out = inputs.q.new_zeros(0, inputs.heads, VALUE_WIDTH, dtype=torch.bfloat16)
        return out, out.new_zeros(0, inputs.heads, dtype=torch.float32)

    notes = (*_padding_note(inputs), "no query token: the kernel wasn't launched")
    return PreparedDecode(launch, lambda raw: back_to_rows(inputs, *raw), notes)


def contiguous(name: str, tensor: Tensor, notes: list[str]) -> Tensor:
    """The tensor with its rows one after another, as the kernels' loads of 16 bytes need them."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    notes.append(f"{name} copied: it wasn't contiguous from a multiple of 16 bytes on")
    return tensor.clone(memory_format=torch.contiguous_format)


def _rows(inputs: DecodeInputs, notes: list[str]) -> Tensor:
    return contiguous("q", inputs.q[: inputs.query_start_loc[-1]], notes)


def _table(inputs: DecodeInputs, requests: list[int]) -> Tensor:
    """Block-table rows of these requests; FlashMLA reads entry 0 even of a row without a key."""
    table = inputs.block_table
    if table.shape[1] == 0:
        table = table.new_zeros(table.shape[0], 1)
    return table[torch.tensor(requests, dtype=torch.long, device=table.device)].contiguous()


def _padding_note(inputs: DecodeInputs) -> list[str]:
    padded = inputs.tokens - inputs.query_start_loc[-1]
    if not padded:
        return []
    return [
        f"{padded} padded rows kept from the kernel; their out 0 and lse -inf are the adapter's"
    ]
