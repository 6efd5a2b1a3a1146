"""The public entry point: checks, backend choice, and what all backends have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import backends
from jax_impl.arrays import is_traced, namespace
from jax_impl.prefill.sparse import kernel_sm90, xla
from jax_impl.prefill.sparse.arguments import D_V, check
from jax_impl.prefill.sparse.batch import BatchRows
from jax_impl.prefill.sparse.result import SparsePrefillResult, result_of_no_tokens

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float32, Int32

# Few, so that several tiles pass through one simulated thread block, one after another.
INTERPRETED_CTAS = 2


def sparse_prefill(
    q: BFloat16[Any, "T H D"],
    kv: BFloat16[Any, "S D"] | BFloat16[Any, "S 1 D"],
    indices: Int32[Any, "T K"] | Int32[Any, "T 1 K"],
    sm_scale: float,
    *,
    d_v: int = 512,
    attn_sink: Float32[Any, " H"] | None = None,
    topk_length: Int32[Any, " T"] | None = None,
    backend: str = "auto",
    validate: bool = True,
) -> SparsePrefillResult:
    """Attention of each query token over the KV rows that its index list names.

    With z = sm_scale * (q . key) over the valid slots of a token, in natural units:

        max_logits = max z,   lse = ln sum exp(z),
        out = sum exp(z) value / (sum exp(z) + exp(attn_sink))

    where the value of a KV row is its first 512 columns (the contract of FlashMLA's
    `flash_mla_sparse_fwd`, SM90).

    Args:
      q: [T, H, D] bfloat16 queries, H from 1 to 128, D 512 or 576.
      kv: [S, D] or [S, 1, D] bfloat16; key and value in one row. S may be 0.
      indices: [T, K] or [T, 1, K] int32 rows of kv, any K >= 1. A negative entry, or one of S
        or more, is a hole wherever it stands; an entry that occurs twice counts twice.
      sm_scale: multiplies the dot product. Any finite number: at 0 every valid key has logit
        0, a negative one is applied by negating q. Not a traced value.
      d_v: width of the output; 512 only.
      attn_sink: [H] float32, natural units, not scaled by sm_scale. It enlarges the
        denominator of `out` and nothing else. -inf: no sink. +inf: out is 0. NaN: out is NaN.
      topk_length: [T] int32; slot j of a token takes part only if j < topk_length. None means K.
        A length outside [0, K] is an error, or, where values can't be seen (inside jit, or
        validate=False), acts as the nearest of the two.
      backend: "auto" is the Pallas kernel on a Hopper GPU and "xla" anywhere else. "pallas-
        interpret" runs the kernel's own body under Pallas' GPU interpreter, on the CPU.
      validate: looks at the values of topk_length outside jit, which waits for them.

    Arrays are JAX's or NumPy's (bfloat16 through ml_dtypes); any other that speaks DLPack, such
    as a torch tensor without a gradient, is taken over without a copy if it is compact; the call
    then returns when it is done with that memory. Inside jit it must stay as it is.

    Returns:
      SparsePrefillResult(out [T, H, 512] bfloat16, max_logits [T, H], lse [T, H] float32).
      A token without a valid slot: out 0, max_logits -inf, lse +inf, whatever q and the sink
      hold. NaN in q or in a referenced row: out and lse of those (token, head) rows are NaN
      and max_logits is unspecified. Rows of kv that no valid slot names are never looked at.
      T = 0 gives empty arrays without a launch. On "pallas" and "pallas-interpret" a row all
      of whose logits lie under -6.9e29 counts as empty, as it does in FlashMLA.

    Raises:
      ValueError: an argument of the wrong type, dtype or rank, arguments that don't fit
        together, a length outside [0, K], or a scale that is not finite.
      NotImplementedError: more than 128 heads, another D or d_v, or a backend that this
        machine can't run.
    """
    arguments = check(
        q, kv, indices, sm_scale,
        d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, validate=validate,
    )  # fmt: skip
    backend = backends.resolve(backend)
    num_tokens, num_heads, _ = arguments.q.shape
    if num_tokens == 0:
        return result_of_no_tokens(num_heads, D_V)

    operands = _operands(
        arguments.kv, arguments.indices, arguments.attn_sink, arguments.topk_length, num_heads
    )
    queries, scale = with_scale_from_0(arguments.q, arguments.sm_scale)
    result = _attend(backend, queries, operands, scale, num_kv=arguments.kv.shape[0])
    if arguments.shared and not is_traced(*result):
        jax.block_until_ready(result)
    return result


def sparse_prefill_into(
    batch: BatchRows,
    kv: BFloat16[Array, "S D"],
    indices: Int32[Array, "t K"],
    sm_scale: float,
    *,
    attn_sink: Float32[Array, " H"] | None,
    topk_length: Int32[Array, " t"],
    backend: str,
) -> None:
    """sparse_prefill of t tokens of a batch by their t lists, inside jit; nothing is checked.

    The kernel reads queries and writes results where they are; "xla" and a negative scale copy.
    """
    operands = _operands(kv, indices, attn_sink, topk_length, batch.q.shape[1])
    num_kv = kv.shape[0]
    if backend != "xla" and sm_scale >= 0:
        kernel_sm90.attend_into(
            batch, *operands.in_order(sm_scale), num_kv=num_kv, **_launch_settings(backend)
        )
        return
    queries, scale = with_scale_from_0(batch.queries(indices.shape[0]), sm_scale)
    batch.write(_attend(backend, queries, operands, scale, num_kv=num_kv))


class _Operands(NamedTuple):
    kv: jax.Array
    indices: jax.Array
    sink: jax.Array
    length: jax.Array

    def in_order(self, scale: float) -> tuple[Any, ...]:
        """As the kernel's entry takes them, behind q."""
        return self.kv, self.indices, base2(scale), self.sink, self.length


def _operands(
    kv: jax.Array,
    indices: jax.Array,
    sink: jax.Array | None,
    length: jax.Array | None,
    num_heads: int,
) -> _Operands:
    if not kv.shape[0]:
        # A gather from an array without rows is an error even where every slot is a hole.
        kv = namespace(kv).zeros((1, kv.shape[1]), kv.dtype)
    return _Operands(kv, indices, *sink_and_length(sink, length, indices, num_heads))


def _attend(
    backend: str, q: jax.Array, operands: _Operands, scale: float, *, num_kv: int
) -> SparsePrefillResult:
    """scale >= 0."""
    if backend == "pallas-interpret" and not is_traced(q, *operands):
        q, operands = jax.device_put((q, operands), jax.local_devices(backend="cpu")[0])
    if backend == "xla":
        kv, indices, sink, length = operands
        return xla.attend(q, kv, indices, np.float32(scale), sink, length, num_kv=num_kv)
    settings = _launch_settings(backend)
    return kernel_sm90.attend(q, *operands.in_order(scale), num_kv=num_kv, **settings)


def _launch_settings(backend: str) -> dict[str, Any]:
    """How the kernel is run on a backend that isn't "xla"."""
    if backend == "pallas":
        return {"config": kernel_sm90.Config.for_device(jax.devices()[0])}
    config = kernel_sm90.Config(num_ctas=INTERPRETED_CTAS)
    return {"config": config, "interpret": plgpu.InterpretGPUParams()}


def sink_and_length(
    sink: jax.Array | None, length: jax.Array | None, indices: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Both as arrays: every combination of optional arguments runs the same program."""
    num_tokens, topk = indices.shape
    if sink is None:
        sink = np.full((num_heads,), -np.inf, np.float32)
    if length is None:
        length = np.full((num_tokens,), topk, np.int32)
    return sink, length


def with_scale_from_0(q: jax.Array, sm_scale: float) -> tuple[jax.Array, float]:
    """The same logits of a scale that isn't negative.

    The masked score -inf must stay -inf when scaled, and the running maximum a maximum.
    """
    return (-q if sm_scale < 0 else q), abs(sm_scale)


def base2(scale: float) -> Any:
    """The kernel's scale: from q.k to base-2 logits, on the host so that it costs no launch."""
    return np.full((1,), scale * math.log2(math.e), np.float32)
