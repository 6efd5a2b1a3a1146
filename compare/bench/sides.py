"""What the bench times: shapes, their data on the GPU, and the launch of each contender.

Data are made by torch where they are used, since a GPU makes them in a moment, and handed to JAX
without a copy. Both sides are given resident arrays; the JAX side is compiled before.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor

from compare.bench.measure import Output, Ready, ready_torch, wait
from compare.suites.sparse_prefill.case import SparsePrefillCase


@dataclasses.dataclass(frozen=True)
class Shape:
    """s_q, s_kv, h, d, topk of one sparse prefill call: T, S, H, D, K."""

    s_q: int
    s_kv: int
    h: int
    d: int
    topk: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape written as five numbers, s_q,s_kv,h,d,topk. Raises ValueError."""
        words = text.split(",")
        if len(words) != 5 or not all(word.strip().isdecimal() for word in words):
            raise ValueError(f"{text!r} isn't a shape; accepted are s_q,s_kv,h,d,topk or six")
        s_q, s_kv, h, d, topk = map(int, words)
        if min(s_q, s_kv, topk) < 1 or d not in (512, 576) or not 1 <= h <= 128:
            raise ValueError(f"{text!r} isn't a shape; accepted are d 512 or 576, h 1 to 128")
        return cls(s_q, s_kv, h, d, topk)

    @property
    def case(self) -> SparsePrefillCase:
        return SparsePrefillCase(s_q=self.s_q, s_kv=self.s_kv, h=self.h, d=self.d, topk=self.topk)

    @property
    def flop(self) -> int:
        return self.case.flop

    @property
    def sm_scale(self) -> float:
        return self.d**-0.5

    @property
    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, kv and indices as JAX compiles for them."""
        return (
            jax.ShapeDtypeStruct((self.s_q, self.h, self.d), "bfloat16"),
            jax.ShapeDtypeStruct((self.s_kv, self.d), "bfloat16"),
            jax.ShapeDtypeStruct((self.s_q, self.topk), "int32"),
        )


SIX = tuple(
    Shape(*words)
    for words in (
        (4096, 8192, 128, 576, 2048),
        (4096, 65536, 128, 576, 2048),
        (4096, 65536, 64, 576, 2048),
        (4096, 65536, 128, 512, 640),
        (4096, 65536, 64, 512, 640),
        (1024, 8192, 128, 576, 2048),
    )
)

DATA = "q and kv N(0, 1) in bfloat16, indices uniform over all kv rows, sm_scale d^-0.5, no sink"


@dataclasses.dataclass(frozen=True)
class Data:
    """The arguments of a shape as torch tensors on one device; all slots are valid."""

    q: BFloat16[Tensor, "T H D"]
    kv: BFloat16[Tensor, "S D"]
    indices: Int32[Tensor, "T K"]
    sm_scale: float

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.kv, self.indices


def make_data(shape: Shape, seed: int, device: str) -> Data:
    """The data of a shape, by a fixed seed of torch's generator on that device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    q, kv = normal(shape.s_q, shape.h, shape.d), normal(shape.s_kv, shape.d)
    indices = torch.randint(
        shape.s_kv,
        (shape.s_q, shape.topk),
        generator=generator,
        device=device,
        dtype=torch.int32,
    )
    return Data(q, kv, indices, shape.sm_scale)


JaxFunction = Callable[[jax.Array, jax.Array, jax.Array, float], Any]
"""(q [T, H, D], kv [S, D], indices [T, K], sm_scale) -> (out, max_logits, lse)."""


def backend(name: str) -> JaxFunction:
    """jax_impl.sparse_prefill on one of its backends."""
    import jax_impl

    return lambda q, kv, indices, sm_scale: jax_impl.sparse_prefill(
        q, kv, indices, sm_scale, backend=name, validate=False
    )


def configured(config: Any) -> JaxFunction:
    """The Hopper kernel with another Config."""
    from jax_impl.prefill.sparse.kernel_sm90.launch import attend

    def run(q: jax.Array, kv: jax.Array, indices: jax.Array, sm_scale: float) -> Any:
        scale = np.full((1,), sm_scale * math.log2(math.e), np.float32)
        sink = np.full((q.shape[1],), -np.inf, np.float32)
        length = np.full((q.shape[0],), indices.shape[1], np.int32)
        return attend(
            q, kv, indices, scale, sink, length, num_kv=kv.shape[0], config=config
        )  # fmt: skip

    return run


def parse_config(text: str) -> tuple[str, Any]:
    """NAME:key=value,key=value as the name and a Config. Raises ValueError."""
    from jax_impl.prefill.sparse.kernel_sm90.config import Config

    name, values = config_words(text, Config)
    return name, Config(**values)


def config_words(text: str, config: type) -> tuple[str, dict[str, Any]]:
    """NAME:key=value,key=value as the name and the arguments of a Config. Raises ValueError."""
    name, colon, words = text.partition(":")
    known = {field.name: field.default for field in dataclasses.fields(config)}
    values = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            raise ValueError(f"--config {text}: {word!r} isn't accepted; keys: {', '.join(known)}")
        values[key] = _value(value, known[key])
    if not name or not colon:
        raise ValueError(f"--config {text}: write NAME:key=value,key=value")
    return name, values


def _value(text: str, default: Any) -> Any:
    if isinstance(default, bool):
        return text.lower() in ("1", "true")
    if isinstance(default, int | float):
        return type(default)(ast.literal_eval(text))
    return None if text == "None" else text


def compile_jax(function: JaxFunction, shape: Shape) -> Callable[..., Any]:
    """The compiled program of a shape."""
    bound = jax.jit(lambda q, kv, indices: function(q, kv, indices, shape.sm_scale))
    return bound.lower(*shape.specs).compile()


def ready_jax(compiled: Callable[..., Any], data: Data) -> Ready:
    """A compiled program on the data that torch made."""
    wait(data.q.device)  # JAX's stream doesn't wait for torch's
    arrays = [jax.dlpack.from_dlpack(tensor) for tensor in data.arrays]

    def once() -> Output:
        result = jax.block_until_ready(compiled(*arrays))
        out, _, lse = jax.tree.leaves(result)
        return Output(torch.from_dlpack(out), torch.from_dlpack(lse))

    def launch(n: int) -> None:
        result = None
        for _ in range(n):
            result = compiled(*arrays)
        jax.block_until_ready(result)

    return Ready(once, launch)


def ready_flash_mla(data: Data) -> Ready:
    """FlashMLA's own function on the data. Raises ValueError where it would need padding."""
    from torch_ref.cuda import flash_mla_adapter as adapter
    from torch_ref.prefill.inputs import check_inputs

    if reason := adapter.unsupported_reason(d_qk=data.q.shape[2]):
        raise NotImplementedError(reason)
    build = adapter.find_build()
    assert build is not None
    checked = check_inputs(*data.arrays, data.sm_scale, d_v=512, attn_sink=None, topk_length=None)
    inputs, notes = adapter.pad_for_kernel(checked)
    if notes:
        raise ValueError(f"the time would include what FlashMLA doesn't do itself: {notes[0]}")
    hopper = torch.cuda.get_device_capability()[0] == 9
    options = {"use_legacy": hopper or data.q.shape[2] == 576} if build.takes_use_legacy else {}
    kv, indices = inputs.kv[:, None, :], inputs.indices[:, None, :]

    def call() -> Output:
        out, _, lse = build.function(
            inputs.q, kv, indices, inputs.sm_scale, 512, None, None, **options
        )
        return Output(out, lse)

    return ready_torch(call, data.q.device)


def ready_eager(data: Data) -> Ready:
    """The eager reference on the data."""
    import torch_ref

    def call() -> Output:
        result = torch_ref.sparse_prefill(*data.arrays, data.sm_scale)
        return Output(result.out, result.lse)

    return ready_torch(call, data.q.device)
