"""What the bench of the V4 path runs: batches, their caches on the GPU, and each contender.

Caches are made by torch where they are used and handed to JAX without a copy. Attention alone and
its reference read one and the same workspace and lists, which torch_ref's stages made: the gather
alone has to give that workspace bit for bit.

FlashMLA's FP8 sparse decode is no contender: its adapter looks at every slot on the host before
each launch, and a time would be that of the looking.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import BFloat16, Int32, UInt8
from torch import Tensor

import jax_impl
from compare.bench.measure import Output, Ready, ready_torch, wait
from compare.bench.v4_shape import FORMAT, PAGE, WINDOW, D, Shape
from jax_impl.kv_cache import PagedKV, gather_kv_into

SM_SCALE = D**-0.5 / 16
DATA = (
    "q N(0, 1) in bfloat16; v4-fp8 caches of random codes without NaN, scale bytes 118 to 126, 64 "
    "columns N(0, 1), pages permuted; entries uniform over those that a token sees, all of them "
    "in order where it sees at most topk; sm_scale 512^-0.5 / 16, which makes logits of the order "
    "of 1; no sink, no images"
)
PLANNING = "chunks are planned on the host when a program is compiled: no plan is in a time"

WHOLE, FUSED, ATTENTION, GATHER = "", "-fused", "-attention", "-gather"
"""What follows a backend's name in a contender's."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A batch as torch tensors on one device, by v4_prefill's names."""

    shape: Shape
    arrays: dict[str, Tensor]

    @property
    def q(self) -> BFloat16[Tensor, "T H 512"]:
        return self.arrays["q"]

    @property
    def reference_arguments(self) -> dict[str, Any]:
        """The arguments that all forms of torch_ref's path share."""
        start = torch.from_numpy(self.shape.query_start_loc).to(self.q.device)
        pages: dict[str, Any] = {"swa_page": PAGE}
        if self.shape.has_compressed:
            pages["compressed_page"] = self.shape.compressed_page
        return {
            **self.arrays,
            **pages,
            "query_start_loc": start,
            "sm_scale": SM_SCALE,
            "kv_format": FORMAT,
            "compress_ratio": self.shape.ratio,
            "window": WINDOW,
        }


def make_data(shape: Shape, seed: int, device: str) -> Data:
    """The data of a shape, by a fixed seed of torch's generator on that device."""
    generator = torch.Generator(device).manual_seed(seed)
    specs = shape.specs

    def table(name: str) -> Tensor:
        n, columns = specs[name].shape
        pages = torch.randperm(n * columns, generator=generator, device=device)
        return pages.view(n, columns).int()

    arrays = {
        "q": torch.randn(
            specs["q"].shape, generator=generator, device=device, dtype=torch.bfloat16
        ),
        "swa_cache": _cache(specs["swa_cache"].shape, PAGE, generator),
        "swa_block_table": table("swa_block_table"),
        "seq_lens": torch.full((shape.requests,), shape.context, device=device).int(),
    }
    if shape.has_compressed:
        arrays |= {
            "compressed_cache": _cache(
                specs["compressed_cache"].shape, shape.compressed_page, generator
            ),
            "compressed_block_table": table("compressed_block_table"),
            "topk_indices": _entries(shape, generator),
        }
    return Data(shape, arrays)


def _cache(size: tuple[int, ...], page: int, generator: torch.Generator) -> UInt8[Tensor, "N B"]:
    """Pages of random tokens: 448 codes and 64 bfloat16 each, then 7 scales and a byte
    of padding each."""
    device = generator.device
    cache = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
    tokens = cache[:, : page * 576].unflatten(1, (page, 576))
    codes = tokens[..., :448]
    codes[(codes & 0x7F) == 0x7F] = 0x38
    plain = torch.randn(
        (len(cache), page, 64), generator=generator, device=device, dtype=torch.bfloat16
    )
    tokens[..., 448:] = plain.view(torch.uint8)
    scales = cache[:, page * 576 : page * 584].unflatten(1, (page, 8))
    scales[..., :7] = torch.randint(
        118, 127, (len(cache), page, 7), generator=generator, device=device, dtype=torch.uint8
    )
    return cache


def _entries(shape: Shape, generator: torch.Generator) -> Int32[Tensor, "T topk"]:
    device = generator.device
    positions = torch.from_numpy(np.tile(shape.positions, shape.requests)).to(device)
    seen = ((positions + 1) // shape.ratio)[:, None]
    column = torch.arange(shape.topk, device=device)
    random = torch.rand((len(seen), shape.topk), generator=generator, device=device)
    chosen = torch.minimum((random * seen).long(), seen - 1)
    chosen = torch.where(seen > shape.topk, chosen, column)
    return chosen.masked_fill(column >= seen, -1).int()


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What attention alone is given: kv of all workspace rows, each token's rows of it."""

    q: BFloat16[Tensor, "T H 512"]
    workspace: BFloat16[Tensor, "n M 512"]
    indices: Int32[Tensor, "T C"]
    lengths: Int32[Tensor, " T"]

    @property
    def kv(self) -> BFloat16[Tensor, "S 512"]:
        return self.workspace.flatten(0, 1)


def gathered(data: Data) -> Gathered:
    """By torch_ref's plan, gathers and lists; no attention is computed."""
    import torch_ref

    def attend(q: Tensor, *_: Any, **__: Any) -> Any:
        statistics = q.new_zeros(q.shape[:2], dtype=torch.float32)
        return torch_ref.SparsePrefillResult(torch.zeros_like(q), statistics, statistics)

    found = torch_ref.v4_prefill(
        **data.reference_arguments, **data.shape.engine, attend=attend, keep_stages=True
    )
    assert found.stages is not None
    if len(found.stages) != 1:
        raise NotImplementedError(
            f"stages alone are timed in one chunk; the plan has {len(found.stages)}"
        )
    (stage,) = found.stages
    return Gathered(data.q, stage.workspace, stage.indices, stage.lengths)


Program = Callable[..., Any]


def path(shape: Shape, arrays: dict[str, Any], backend: str, *, fused: bool) -> Any:
    """jax_impl.v4_prefill of Data's arrays inside jit: (out, max_logits, lse)."""
    given = dict(arrays)
    swa = PagedKV(given.pop("swa_cache"), PAGE, FORMAT)
    compressed = None
    if shape.has_compressed:
        compressed = PagedKV(given.pop("compressed_cache"), shape.compressed_page, FORMAT)
    found = jax_impl.v4_prefill(
        swa=swa,
        compressed=compressed,
        query_start_loc=shape.query_start_loc,
        seq_lens_bound=np.full(shape.requests, shape.context, np.int32),
        sm_scale=SM_SCALE,
        compress_ratio=shape.ratio,
        window=WINDOW,
        fused=fused,
        backend=backend,
        validate=False,
        **given,
        **shape.engine,
    )
    return found.out, found.max_logits, found.lse


def compile_path(shape: Shape, backend: str, *, fused: bool) -> Any:
    program = jax.jit(lambda arrays: path(shape, arrays, backend, fused=fused))
    return program.lower(shape.specs).compile()


def compile_attention(shape: Shape, backend: str) -> Any:
    tokens, (n, m, _) = shape.num_tokens, shape.workspace_shape
    specs = (
        shape.specs["q"],
        jax.ShapeDtypeStruct((n * m, D), "bfloat16"),
        jax.ShapeDtypeStruct((tokens, shape.list_columns), "int32"),
        jax.ShapeDtypeStruct((tokens,), "int32"),
    )

    def attend(q: Any, kv: Any, indices: Any, lengths: Any) -> Any:
        return tuple(
            jax_impl.sparse_prefill(
                q, kv, indices, SM_SCALE, topk_length=lengths, backend=backend, validate=False
            )
        )

    return jax.jit(attend).lower(*specs).compile()


def compile_gather(shape: Shape, backend: str) -> Any:
    """Both caches into one workspace, as a chunk does it."""
    workspace = jax.ShapeDtypeStruct(shape.workspace_shape, jnp.bfloat16)
    lens = np.full(shape.requests, shape.window_rows, np.int32)
    entries = np.full(shape.requests, shape.entries, np.int32)

    def gather(arrays: dict[str, Any]) -> Any:
        ref = jax.empty_ref(workspace)
        if shape.has_compressed:
            cache = PagedKV(arrays["compressed_cache"], shape.compressed_page, FORMAT)
            table = arrays["compressed_block_table"]
            gather_kv_into(cache, table, jnp.asarray(entries), ref, backend=backend)
        gather_kv_into(
            PagedKV(arrays["swa_cache"], PAGE, FORMAT), arrays["swa_block_table"],
            arrays["seq_lens"], ref, gather_lens=jnp.asarray(lens), offset=shape.entries,
            backend=backend,
        )  # fmt: skip
        return ref[...]

    return jax.jit(gather).lower(shape.specs).compile()


COMPILERS: dict[str, Callable[[Shape, str], Program]] = {
    WHOLE: lambda shape, backend: compile_path(shape, backend, fused=False),
    FUSED: lambda shape, backend: compile_path(shape, backend, fused=True),
    ATTENTION: compile_attention,
    GATHER: compile_gather,
}


def ready_path(program: Program, data: Data) -> Ready:
    wait(data.q.device)  # JAX's stream doesn't wait for torch's
    arrays = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in data.arrays.items()}
    return _ready_jax(program, (arrays,))


def ready_attention(program: Program, given: Gathered) -> Ready:
    wait(given.q.device)
    tensors = (given.q, given.kv, given.indices, given.lengths)
    return _ready_jax(program, tuple(map(jax.dlpack.from_dlpack, tensors)))


def _ready_jax(program: Program, arguments: tuple[Any, ...]) -> Ready:
    def once() -> Output:
        out, _, lse = jax.block_until_ready(program(*arguments))
        return Output(torch.from_dlpack(out), torch.from_dlpack(lse))

    return Ready(once, launcher(program, arguments))


def launcher(program: Program, arguments: tuple[Any, ...]) -> Callable[[int], None]:
    def launch(n: int) -> None:
        result = None
        for _ in range(n):
            result = program(*arguments)
        jax.block_until_ready(result)

    return launch


class SameBits:
    """Holds every contender that is checked by it to the bits of the first one."""

    def __init__(self) -> None:
        self._first: tuple[str, Output] | None = None

    def checked(self, name: str, ready: Ready) -> Ready:
        """`ready`, whose once() raises ValueError where out or lse have other bits."""

        def once() -> Output:
            output = ready.once()
            if self._first is None:
                self._first = (name, output)
                return output
            other, first = self._first
            for part, width in (("out", torch.int16), ("lse", torch.int32)):
                mine, theirs = (getattr(each, part).view(width) for each in (output, first))
                if unequal := int((mine != theirs).sum()):
                    raise ValueError(f"{unequal} values of {part} have other bits than {other}'s")
            return output

        return Ready(once, ready.launch)


def check_gather(program: Program, data: Data, wanted: Tensor) -> Callable[[int], None]:
    """The gather's launches, once its workspace is the wanted one. Raises ValueError."""
    wait(data.q.device)
    arrays = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in data.arrays.items()}
    found = torch.from_dlpack(jax.block_until_ready(program(arrays)))
    if unequal := int((found.view(torch.int16) != wanted.view(torch.int16)).any(-1).sum()):
        raise ValueError(f"wrong: {unequal} of {math.prod(wanted.shape[:2])} rows have other bits")
    return launcher(program, (arrays,))


def ready_flash_mla(given: Gathered) -> Ready:
    """FlashMLA's own sparse prefill on it. Raises ValueError where it would need padding."""
    from torch_ref.cuda import flash_mla_adapter as adapter
    from torch_ref.prefill.inputs import check_inputs

    if reason := adapter.unsupported_reason(d_qk=D):
        raise NotImplementedError(reason)
    build = adapter.find_build()
    assert build is not None
    checked = check_inputs(
        given.q, given.kv, given.indices, SM_SCALE, d_v=D, attn_sink=None,
        topk_length=given.lengths,
    )  # fmt: skip
    inputs, notes = adapter.pad_for_kernel(checked)
    if notes:
        raise ValueError(f"the time would include what FlashMLA doesn't do itself: {notes[0]}")
    hopper = torch.cuda.get_device_capability()[0] == 9
    options = {"use_legacy": hopper} if build.takes_use_legacy else {}
    kv, indices = inputs.kv[:, None, :], inputs.indices[:, None, :]

    def call() -> Output:
        out, _, lse = build.function(
            inputs.q, kv, indices, SM_SCALE, D, None, inputs.topk_length, **options
        )
        return Output(out, lse)

    return ready_torch(call, given.q.device)


def ready_eager(given: Gathered) -> Ready:
    """The eager reference's attention on it."""
    import torch_ref

    def call() -> Output:
        found = torch_ref.sparse_prefill(
            given.q, given.kv, given.indices, SM_SCALE, topk_length=given.lengths
        )
        return Output(found.out, found.lse)

    return ready_torch(call, given.q.device)


REFERENCES: dict[str, Callable[[Gathered], Ready]] = {
    "flash_mla": ready_flash_mla,
    "torch": ready_eager,
}
