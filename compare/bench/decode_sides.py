"""What the bench of decode times: batches, their data on the GPU, and each contender's launch.

Data are made by torch where they are used, and handed to JAX without a copy. Everything that a
serving engine does once a step (plans, schedules, page lists) is done before the clock runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from compare.bench.measure import Output, Ready, ready_torch, wait
from compare.generate.ownership import local_length
from compare.generate.streams import below

PAGE = 64
RANK = 0
DATA = (
    "q and keys N(0, 1) in bfloat16, pages of 64 in random order, sm_scale 576^-0.5, rank 0; "
    "lengths given as a range drawn from it"
)
SM_SCALE = 576**-0.5
_STREAM = 0x62656E63


@dataclasses.dataclass(frozen=True)
class Shape:
    """b requests of q query tokens, h heads and l keys on all ranks of `world` together; q and l
    are ranges (least, most), both included.
    """

    b: int
    q: tuple[int, int]
    h: int
    l: tuple[int, int]
    world: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape written as b,q,h,l or b,q,h,l,world; q and l are numbers or LEAST-MOST. Raises
        ValueError.
        """
        accepted = (
            f"{text!r} isn't a shape; accepted are seven, ragged or b,q,h,l[,world] with q and l a "
            "number or LEAST-MOST, q at least 1 and at most l, h 1 to 128"
        )
        words = text.split(",")
        try:
            b, h = int(words[0]), int(words[2])
            q, keys = _range(words[1]), _range(words[3])
            world = int(words[4]) if len(words) == 5 else 1
        except (ValueError, IndexError):
            raise ValueError(accepted) from None
        whole = len(words) in (4, 5) and min(b, world) >= 1 and 1 <= h <= 128
        if not whole or not 1 <= q[0] <= q[1] <= keys[0] <= keys[1]:
            raise ValueError(accepted)
        return cls(b, q, h, keys, world)

    @property
    def case(self) -> str:
        """The words that parse reads, each with its name."""
        group = f",world={self.world}" if self.world > 1 else ""
        return f"decode:b={self.b},q={_text(self.q)},h={self.h},l={_text(self.l)}{group}"

    @property
    def query_lens(self) -> tuple[int, ...]:
        return _drawn(self.q, self.b, 0)

    @property
    def total_lens(self) -> tuple[int, ...]:
        return _drawn(self.l, self.b, 1)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys on this rank."""
        return tuple(local_length(total, RANK, self.world, 1) for total in self.total_lens)

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return tuple(np.cumsum((0, *self.query_lens)).tolist())

    @property
    def flattened(self) -> bool:
        """Whether FlashMLA needs one row per token: its own triangle is wrong on a shard, and it
        takes one query length for all.
        """
        return self.world > 1 or len(set(self.query_lens)) > 1

    @property
    def flop(self) -> int:
        """Multiply-adds times two over the keys that each token sees on this rank."""
        seen = sum(
            local_length(total - later, RANK, self.world, 1)
            for total, queries in zip(self.total_lens, self.query_lens, strict=True)
            for later in range(queries)
        )
        return 2 * self.h * seen * (576 + 512)


# The first seven are those of the project's first measurements; the others mix query lengths.
SEVEN = tuple(
    Shape(b, (q, q), h, (keys, keys))
    for b, q, h, keys in (
        (128, 1, 128, 4096),
        (128, 1, 16, 8192),
        (32, 1, 64, 16384),
        (32, 8, 16, 16384),
        (32, 8, 64, 8192),
        (128, 2, 128, 4096),
        (1, 8, 128, 65536),
    )
)
RAGGED = tuple(
    Shape(32, (1, 8), h, (8192, 16384), world) for world in (2, 4) for h in (16, 64, 128)
)


@dataclasses.dataclass(frozen=True)
class Data:
    """The tensors of a shape on one device; every keys' slot of the cache is filled."""

    shape: Shape
    q: BFloat16[Tensor, "T H D"]
    kv_cache: BFloat16[Tensor, "N P D"]
    block_table: Int32[Tensor, "B M"]

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.kv_cache, self.block_table

    @functools.cached_property
    def checked(self) -> Any:
        """torch_ref's DecodeInputs of them."""
        from torch_ref.decode.inputs import check_decode_inputs

        shape = self.shape
        lens, starts, totals = (
            torch.tensor(words, dtype=torch.int32)
            for words in (shape.seq_lens, shape.query_start_loc, shape.total_lens)
        )
        return check_decode_inputs(
            *self.arrays,
            lens,
            starts,
            SM_SCALE,
            total_lens=totals,
            dcp_rank=RANK,
            dcp_world=shape.world,
        )


def make_data(shape: Shape, seed: int, device: str) -> Data:
    """The data of a shape, by a fixed seed of torch's generator on that device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    pages = [-(-keys // PAGE) for keys in shape.seq_lens]
    order = torch.randperm(sum(pages), generator=generator, device=device).to(torch.int32)
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    q = normal(shape.query_start_loc[-1], shape.h, 576)
    return Data(shape, q, normal(sum(pages), PAGE, 576), table)


def ready_adapter(name: str, data: Data) -> Ready:
    """A CUDA kernel through torch_ref's adapter, laid out and planned before."""
    prepared = _prepare(name, data)

    def once() -> Output:
        result = prepared.finish(prepared.launch())
        wait(data.q.device)
        return Output(result.out, result.lse)

    def launch(n: int) -> None:
        for _ in range(n):
            prepared.launch()
        wait(data.q.device)

    return Ready(once, launch)


def _prepare(name: str, data: Data) -> Any:
    from torch_ref.cuda import flash_mla_decode, flashinfer_adapter

    kernel = name.removesuffix(FLATTENED)
    flatten = kernel != name
    if kernel == "flash_mla":
        return flash_mla_decode.prepare_decode(data.checked, flatten=flatten)
    backend: Any = kernel.removeprefix("flashinfer-")
    return flashinfer_adapter.prepare_decode(data.checked, backend=backend, flatten=flatten)


FLATTENED = "-flattened"
ADAPTERS = (
    "flash_mla",
    "flash_mla-flattened",
    "flashinfer-fa3",
    "flashinfer-fa3-flattened",
    "flashinfer-fa2",
)


def adapter_reason(name: str) -> str | None:
    """Why an adapter's kernel can't run here; None if it can."""
    from torch_ref.cuda import flash_mla_decode, flashinfer_adapter

    if name.startswith("flash_mla"):
        return flash_mla_decode.unsupported_reason()
    backend: Any = "fa2" if "fa2" in name else "fa3"
    return flashinfer_adapter.unsupported_reason(backend)


def ready_eager(data: Data) -> Ready:
    """The eager reference on the data."""
    import torch_ref

    given, shape = data.checked, data.shape
    lens, starts, totals = (
        torch.tensor(words, dtype=torch.int32)
        for words in (shape.seq_lens, shape.query_start_loc, shape.total_lens)
    )

    def call() -> Output:
        result = torch_ref.dcp_decode(
            *data.arrays,
            lens,
            starts,
            SM_SCALE,
            total_lens=totals,
            dcp_rank=given.dcp_rank,
            dcp_world=given.dcp_world,
        )
        return Output(result.out, result.lse)

    return ready_torch(call, data.q.device)


JaxDecode = Callable[[Any, jax.Array, jax.Array, jax.Array], Any]
"""(operands, q [T, H, 576], kv_cache [pages, 64, 576], block_table [B, M]) -> (out, lse)."""

JaxMaker = Callable[[Shape], tuple[Any, JaxDecode]]
"""Plans a shape on the host: a pytree of arrays, which are put on the device, and the function that
is compiled for them."""


def backend(name: str, config: Any = None) -> JaxMaker:
    """jax_impl.dcp_decode on one of its backends; config: another one of the Hopper kernel."""

    def make(shape: Shape) -> tuple[Any, JaxDecode]:
        import jax_impl

        plan = jax_impl.plan_decode(
            shape.query_start_loc,
            shape.seq_lens,
            shape.total_lens,
            max_query_len=max(shape.query_lens),
            heads=shape.h,
            dcp_rank=RANK,
            dcp_world=shape.world,
        )

        def decode(plan: Any, q: jax.Array, kv_cache: jax.Array, block_table: jax.Array) -> Any:
            if config is None:
                return jax_impl.dcp_decode(q, kv_cache, block_table, plan, SM_SCALE, backend=name)
            from jax_impl.decode.kernel_sm90.launch import attend

            scales = jnp.float32(SM_SCALE), jnp.float32(1)
            return attend(q, kv_cache, block_table, plan, *scales, out_dtype=q.dtype, config=config)

        return plan, decode

    return make


def specs(shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, kv_cache and block_table as JAX compiles for them."""
    pages = [-(-keys // PAGE) for keys in shape.seq_lens]
    return (
        jax.ShapeDtypeStruct((shape.query_start_loc[-1], shape.h, 576), "bfloat16"),
        jax.ShapeDtypeStruct((sum(pages), PAGE, 576), "bfloat16"),
        jax.ShapeDtypeStruct((shape.b, max(pages)), "int32"),
    )


def compile_jax(maker: JaxMaker, shape: Shape) -> tuple[Any, Callable[..., Any]]:
    """The operands of a shape on the device, and its compiled program."""
    operands, function = maker(shape)
    operands = jax.device_put(operands)
    return operands, jax.jit(function).lower(operands, *specs(shape)).compile()


def ready_jax(compiled: tuple[Any, Callable[..., Any]], data: Data) -> Ready:
    """A compiled program on the data that torch made."""
    operands, program = compiled
    wait(data.q.device)  # JAX's stream doesn't wait for torch's
    arrays = [jax.dlpack.from_dlpack(tensor) for tensor in data.arrays]

    def once() -> Output:
        out, lse = jax.tree.leaves(jax.block_until_ready(program(operands, *arrays)))
        return Output(torch.from_dlpack(out), torch.from_dlpack(lse))

    def launch(n: int) -> None:
        result = None
        for _ in range(n):
            result = program(operands, *arrays)
        jax.block_until_ready(result)

    return Ready(once, launch)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    return int(least), int(most or least)


def _text(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _drawn(span: tuple[int, int], count: int, number: int) -> tuple[int, ...]:
    """`count` numbers of a range, the same on every machine; of several both ends are among
    them.
    """
    words = np.random.Philox(key=np.array([number, _STREAM], np.uint64)).random_raw(count)
    values = (span[0] + below(words, span[1] - span[0] + 1)).tolist()
    if count > 1:
        values[0], values[1] = span[1], span[0]
    return tuple(values)
