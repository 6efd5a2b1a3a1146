"""The arguments of DCP decode: checked once, then walked row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import torch
from jaxtyping import BFloat16, Float, Float8e4m3fn, Int32
from torch import Tensor

from torch_ref.arguments import finite_scale, require_device, require_tensor, shape_of
from torch_ref.calls import called_with
from torch_ref.planning import DecodeRows, check_shard, decode_rows, local_key_counts
from torch_ref.planning.decode import query_starts

VALUE_WIDTH = 512
KEY_WIDTH = 576
MAX_HEADS = 128
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

QueryRows = BFloat16[Tensor, "T H D"] | Float8e4m3fn[Tensor, "T H D"]
Pages = BFloat16[Tensor, "N P D"] | Float8e4m3fn[Tensor, "N P D"]


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """One rank's arguments as they are handed in; dcp_decode_oracle says what they mean."""

    q: QueryRows
    kv_cache: Pages
    block_table: Int32[Tensor, "B M"]
    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    sm_scale: float
    _: KW_ONLY
    total_lens: Int32[Tensor, " B"]
    dcp_rank: int = 0
    dcp_world: int = 1
    interleave: int = 1
    causal: bool = True
    kv_scale: float | Tensor | None = None
    q_scale: float | Tensor | None = None


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """One rank's arguments: q [T, H, 576], kv_cache [pages, P, 576], block_table [B, width].

    Lengths are on the host: seq_lens and total_lens one per request, query_start_loc [B + 1].
    A key's and a query's true values are those stored times key_scale and q_scale, a value's those
    stored times value_scale; 1.0 for bf16.
    """

    q: QueryRows
    kv_cache: Pages
    block_table: Int32[Tensor, "B M"]
    seq_lens: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    sm_scale: float
    total_lens: tuple[int, ...]
    dcp_rank: int
    dcp_world: int
    interleave: int
    causal: bool
    q_scale: float
    key_scale: float
    value_scale: float

    @property
    def tokens(self) -> int:
        """Rows of q, padding included."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def page_size(self) -> int:
        return self.kv_cache.shape[1]

    @property
    def query_lens(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.query_start_loc))

    @cached_property
    def readable(self) -> tuple[bool, ...]:
        """Whether a request's block table holds pages of kv_cache for all of its keys."""
        return tuple(problem is None for problem in _table_problems(self))

    @property
    def score_scale(self) -> float:
        """What a product of stored q and key is multiplied by."""
        return self.sm_scale * self.q_scale * self.key_scale

    @cached_property
    def rows(self) -> DecodeRows:
        """Request, global bound and padding of each row of q."""
        return decode_rows(
            self.query_start_loc,
            self.total_lens,
            max_query_len=max((1, *self.query_lens)),
            causal=self.causal,
            num_rows=self.tokens,
        )

    @cached_property
    def key_counts(self) -> tuple[int, ...]:
        """How many of its request's local keys each row of q sees: the first n."""
        return local_key_counts(
            self.rows,
            self.seq_lens,
            dcp_rank=self.dcp_rank,
            dcp_world=self.dcp_world,
            interleave=self.interleave,
        )

    def on(self, device: torch.device | str | None) -> DecodeInputs:
        """The same inputs on `device`; None leaves them where they are."""
        if device is None:
            return self
        return replace(
            self,
            q=self.q.to(device),
            kv_cache=self.kv_cache.to(device),
            block_table=self.block_table.to(device),
        )


@dataclass(frozen=True, eq=False)
class Row:
    """Place `at` of the result: one token's heads and the keys that it sees, as they are stored."""

    at: int
    q: Float[Tensor, "H D"]
    keys: Float[Tensor, "n D"]


def rows_with_keys(
    inputs: DecodeInputs,
    chosen: Sequence[int],
    request: Sequence[int],
    key_counts: Sequence[int],
    dtype: torch.dtype,
) -> Iterator[Row]:
    """The `chosen` rows that see any key, in `dtype`, each with its own n keys and no others.

    request and key_counts are one per row of q. Because a row is given nothing but its own keys,
    whatever lies past its count (NaN included) can't reach it.
    """
    for request_id, places in groupby(range(len(chosen)), key=lambda at: request[chosen[at]]):
        group = [at for at in places if key_counts[chosen[at]] > 0]
        if not group:
            continue
        longest = max(key_counts[chosen[at]] for at in group)
        pages = inputs.block_table[request_id, : -(-longest // inputs.page_size)].long()
        keys = inputs.kv_cache[pages].reshape(-1, KEY_WIDTH)[:longest].to(dtype)
        for at in group:
            t = chosen[at]
            yield Row(at, inputs.q[t].to(dtype), keys[: key_counts[t]])


def check_call(call: DecodeCall) -> DecodeInputs:
    """Checks rank, dtype, shape and values; ValueError names the argument, what it was, what fits.

    Accepted: q [T, H, 576] and kv_cache [pages, P, 576], each bf16 or float8_e4m3fn, H in 1..128,
    P any multiple of interleave; block_table [B, width], seq_lens, total_lens [B] and
    query_start_loc [B + 1], all int32; T at least query_start_loc[-1]; for every request with
    tokens a block table wide enough for its seq_len, with pages in 0..pages - 1 up to there (what
    lies past that is never read); sm_scale, kv_scale and q_scale finite in fp32, the last two
    positive and for float8 only.
    """
    q, kv_cache, block_table = call.q, call.kv_cache, call.block_table
    require_tensor("q", q, *DTYPES)
    require_tensor("kv_cache", kv_cache, *DTYPES)
    for name in ("block_table", "seq_lens", "query_start_loc", "total_lens"):
        require_tensor(name, getattr(call, name), torch.int32)
    if q.ndim != 3 or q.shape[2] != KEY_WIDTH:
        raise ValueError(f"q: shape {shape_of(q)}; accepted is [T, H, {KEY_WIDTH}]")
    T, H, _ = q.shape
    if not 1 <= H <= MAX_HEADS:
        raise ValueError(f"q: {H} heads; accepted are 1 to {MAX_HEADS}")
    if kv_cache.ndim != 3 or kv_cache.shape[2] != KEY_WIDTH or kv_cache.shape[1] < 1:
        raise ValueError(f"kv_cache: shape {shape_of(kv_cache)}; accepted is [pages, P, 576]")
    starts = call.query_start_loc
    if starts.ndim != 1 or not len(starts):
        raise ValueError(f"query_start_loc: shape {shape_of(starts)}; accepted is [B + 1]")
    B = len(starts) - 1
    for name, tensor in (("seq_lens", call.seq_lens), ("total_lens", call.total_lens)):
        if tensor.shape != (B,):
            raise ValueError(
                f"{name}: shape {shape_of(tensor)}; query_start_loc has {B} requests and one "
                "length each is needed"
            )
    if block_table.ndim != 2 or block_table.shape[0] != B:
        raise ValueError(f"block_table: shape {shape_of(block_table)}; accepted is [{B}, width]")
    require_device({"kv_cache": kv_cache, "block_table": block_table}, q.device)
    check_shard(
        dcp_rank=call.dcp_rank,
        dcp_world=call.dcp_world,
        interleave=call.interleave,
        page_size=kv_cache.shape[1],
    )
    if not isinstance(call.causal, bool):
        raise ValueError(f"causal: {call.causal!r}; accepted are True and False")
    key_scale = _scale("kv_scale", call.kv_scale, "kv_cache", kv_cache)
    inputs = DecodeInputs(
        q,
        kv_cache,
        block_table,
        tuple(call.seq_lens.tolist()),
        query_starts(starts.tolist()),
        finite_scale(call.sm_scale),
        tuple(call.total_lens.tolist()),
        call.dcp_rank,
        call.dcp_world,
        call.interleave,
        call.causal,
        q_scale=_scale("q_scale", call.q_scale, "q", q),
        key_scale=key_scale,
        value_scale=key_scale,
    )
    if inputs.query_start_loc[-1] > T:
        raise ValueError(f"q: {T} rows; query_start_loc counts {inputs.query_start_loc[-1]} tokens")
    _ = inputs.key_counts  # the planner's own checks of the lengths
    for queries, problem in zip(inputs.query_lens, _table_problems(inputs), strict=True):
        if queries and problem:
            raise ValueError(problem)
    return inputs


check_decode_inputs = called_with(DecodeCall)(check_call)


def _table_problems(inputs: DecodeInputs) -> list[str | None]:
    """Says of each request what is wrong with its block table, None if nothing is."""
    (_, width), pages = inputs.block_table.shape, inputs.kv_cache.shape[0]
    table = inputs.block_table.cpu()
    problems: list[str | None] = []
    for i, length in enumerate(inputs.seq_lens):
        needed = -(-length // inputs.page_size)
        used = table[i, :needed]
        outside = ((used < 0) | (used >= pages)).nonzero()
        if needed > width:
            problems.append(
                f"block_table: width {width}; request {i} has {length} keys, which lie on {needed} "
                f"pages of {inputs.page_size}"
            )
        elif len(outside):
            column = int(outside[0])
            problems.append(
                f"block_table: page {int(used[column])} at column {column} of request {i}, within "
                f"its {length} keys; accepted are pages 0 to {pages - 1}"
            )
        else:
            problems.append(None)
    return problems


def _scale(name: str, value: float | Tensor | None, of: str, tensor: Tensor) -> float:
    if value is None:
        return 1.0
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: shape {shape_of(value)}; accepted is one number per tensor")
        value = float(value)
    scale = finite_scale(value, name)
    if scale <= 0:
        raise ValueError(f"{name}: {scale}; accepted is a positive number")
    if tensor.dtype == torch.bfloat16 and scale != 1.0:
        raise ValueError(f"{name}: {scale} with a bf16 {of}; accepted is None, a scale is for fp8")
    return scale
