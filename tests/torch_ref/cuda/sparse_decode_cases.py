"""Calls of FP8 sparse decode with their float64 answers, for a fake kernel and for the real one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_ref import sparse_prefill_oracle
from torch_ref.cuda.flash_mla_sparse_decode import SlotList
from torch_ref.kv_cache import PagedKV, empty_cache, insert_kv, read_kv


@dataclass(frozen=True, eq=False)
class Call:
    q: Tensor
    main: SlotList
    extra: SlotList | None
    attn_sink: Tensor | None
    sm_scale: float = 512**-0.55

    def on(self, device: str) -> Call:
        def move(given: SlotList | None) -> SlotList | None:
            if given is None:
                return None
            length = None if given.topk_length is None else given.topk_length.to(device)
            return SlotList(given.cache.on(device), given.slots.to(device), length)

        main = move(self.main)
        assert main is not None
        sink = None if self.attn_sink is None else self.attn_sink.to(device)
        return Call(self.q.to(device), main, move(self.extra), sink, self.sm_scale)

    def run(self, adapter: Any) -> tuple[Any, tuple[str, ...]]:
        return adapter.sparse_decode(
            self.q, self.main, self.sm_scale, extra=self.extra, attn_sink=self.attn_sink
        )


def answer(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse in float64, lse -inf for a token without a key."""
    kv, indices, before = [], [], 0
    for given in (call.main, call.extra):
        if given is None:
            continue
        slots = given.slots.clone()
        if given.topk_length is not None:
            behind = torch.arange(slots.shape[1]) >= given.topk_length[:, None]
            slots = slots.masked_fill(behind, -1)
        indices.append(torch.where(slots < 0, -1, slots + before))
        kv.append(read_kv(given.cache, torch.arange(given.cache.num_slots)))
        before += given.cache.num_slots
    result = sparse_prefill_oracle(
        call.q,
        torch.cat(kv),
        torch.cat(indices, dim=1).int(),
        call.sm_scale,
        attn_sink=call.attn_sink,
    )
    return result.out, result.lse.masked_fill(result.lse == math.inf, -math.inf)


def _cache(P: int, tokens: int, g: torch.Generator) -> tuple[PagedKV, Tensor]:
    """A cache with one poisoned page more than it needs, and the slots that hold a token."""
    pages = -(-tokens // P) + 1
    cache = empty_cache("v4-fp8", num_pages=pages, page_size=P, fill=0xFF)
    slots = torch.randperm((pages - 1) * P, generator=g)[:tokens].int() + P
    values = (torch.randn(tokens, 512, generator=g) / 10).clamp(-1, 1)
    return insert_kv(cache, values, slots), slots


def make(
    *,
    T: int = 4,
    heads: int = 64,
    P: int = 64,
    K: int = 128,
    lengths: list[int] | None = None,
    holes: float = 0.0,
    extra_P: int | None = None,
    K2: int = 64,
    extra_lengths: list[int] | None = None,
    garbage: bool = False,
    sink: str = "normal",
    tokens: int = 300,
    seed: int = 0,
) -> Call:
    """Random keys at random slots; `holes` is the share of -1, `garbage` stands behind lengths."""
    g = torch.Generator().manual_seed(seed)

    def listed(page: int, width: int, given: list[int] | None) -> SlotList:
        cache, slots = _cache(page, tokens, g)
        rows = slots[torch.randint(0, tokens, (T, width), generator=g)]
        rows = rows.masked_fill(torch.rand(T, width, generator=g) < holes, -1)
        if given is None:
            return SlotList(cache, rows)
        length = torch.tensor(given, dtype=torch.int32)
        if garbage:
            behind = torch.arange(width) >= length[:, None]
            rows = rows.masked_fill(behind, 0)  # a poisoned token
        return SlotList(cache, rows, length)

    main = listed(P, K, lengths)
    extra = None if extra_P is None else listed(extra_P, K2, extra_lengths)
    values = torch.randn(heads, generator=g)
    if sink == "mixed":
        values[::3], values[1::3] = -math.inf, math.inf
    return Call(
        torch.randn(T, heads, 512, generator=g).clamp(-1, 1).bfloat16(),
        main,
        extra,
        None if sink == "none" else values,
    )


def in_two_lists(call: Call, at: int) -> Call:
    """The same keys with the columns from `at` on as an extra list over the same cache."""
    assert call.extra is None and call.main.topk_length is None
    first, second = (
        SlotList(call.main.cache, slots) for slots in call.main.slots.tensor_split([at], dim=1)
    )
    return Call(call.q, first, second, call.attn_sink, call.sm_scale)


CASES: dict[str, Callable[[], Call]] = {
    "one full list": lambda: make(),
    "128 heads": lambda: make(heads=128, extra_P=2),
    "few heads": lambda: make(heads=3, extra_P=64),
    "no sink": lambda: make(sink="none", extra_P=64),
    "sinks of minus and plus infinity": lambda: make(sink="mixed", extra_P=64),
    "one token": lambda: make(T=1, K=64, lengths=[1]),
    "lengths": lambda: make(T=6, lengths=[1, 63, 64, 65, 127, 128]),
    "garbage behind the lengths": lambda: make(
        T=4, lengths=[1, 64, 65, 100], garbage=True, extra_P=2, extra_lengths=[0, 1, 63, 2]
    ),
    "holes": lambda: make(holes=0.4, extra_P=2, T=8),
    "holes and lengths": lambda: make(
        holes=0.4, T=3, lengths=[10, 70, 128], extra_P=64, extra_lengths=[64, 30, 5]
    ),
    "nothing but holes": lambda: make(holes=1.1, extra_P=2),
    "nothing but holes in the main list": lambda: Call(
        (call := make(extra_P=64, seed=3)).q,
        SlotList(call.main.cache, torch.full_like(call.main.slots, -1)),
        call.extra,
        call.attn_sink,
    ),
    "main length 0 beside a full extra list": lambda: make(
        T=3, lengths=[0, 5, 0], extra_P=2, extra_lengths=[64, 64, 7]
    ),
    "extra length 0": lambda: make(T=3, lengths=[9, 5, 128], extra_P=2, extra_lengths=[0, 0, 0]),
    "both lengths 0": lambda: make(
        T=4, lengths=[0, 5, 0, 0], extra_P=2, extra_lengths=[0, 0, 7, 0]
    ),
    "pages of 2": lambda: make(P=2, extra_P=2),
    "pages of 53 and 576": lambda: make(P=53, extra_P=576, tokens=700),
    "pages of 256 and 128": lambda: make(P=256, extra_P=128),
    "widths that are padded": lambda: make(K=100, extra_P=2, K2=3, T=5),
    "long lists": lambda: make(T=2, K=1024, extra_P=64, K2=512, tokens=2000),
}
