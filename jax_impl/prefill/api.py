"""The public entry point: checks, backend choice, and what all backends have in common."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import backends
from jax_impl.arrays import is_traced
from jax_impl.prefill import kernel_sm90, xla
from jax_impl.prefill.arguments import D_V, check
from jax_impl.prefill.result import SparsePrefillResult, result_of_no_tokens

if TYPE_CHECKING:
    from jaxtyping import BFloat16, Float32, Int32

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
    num_tokens, num_heads, d_qk = arguments.q.shape
    if num_tokens == 0:
        return result_of_no_tokens(num_heads, D_V)

    # The masked score -inf must stay -inf when scaled, and the running maximum a maximum.
    queries = -arguments.q if arguments.sm_scale < 0 else arguments.q
    # A gather from an array without rows is an error even where every slot is a hole.
    num_kv = arguments.kv.shape[0]
    rows = arguments.kv if num_kv else jnp.zeros((1, d_qk), arguments.kv.dtype)
    # Every combination of optional arguments runs the same program.
    sink, length = arguments.attn_sink, arguments.topk_length
    if sink is None:
        sink = jnp.full((num_heads,), -jnp.inf, jnp.float32)
    if length is None:
        length = jnp.full((num_tokens,), arguments.indices.shape[1], jnp.int32)
    attend = _ATTEND[backend]
    scale = abs(arguments.sm_scale)
    result = attend(queries, rows, arguments.indices, scale, sink, length, num_kv=num_kv)
    if arguments.shared and not is_traced(*result):
        jax.block_until_ready(result)
    return result


def _attend_xla(q, kv, indices, scale, sink, length, *, num_kv) -> SparsePrefillResult:
    return xla.attend(q, kv, indices, np.float32(scale), sink, length, num_kv=num_kv)


def _attend_pallas(q, kv, indices, scale, sink, length, *, num_kv) -> SparsePrefillResult:
    config = kernel_sm90.Config.for_device(jax.devices()[0])
    return kernel_sm90.attend(
        q, kv, indices, base2(scale), sink, length, num_kv=num_kv, config=config
    )


def _attend_interpreted(q, kv, indices, scale, sink, length, *, num_kv) -> SparsePrefillResult:
    arrays = (q, kv, indices, sink, length)
    if not is_traced(*arrays):
        arrays = jax.device_put(arrays, jax.local_devices(backend="cpu")[0])
    q, kv, indices, sink, length = arrays
    return kernel_sm90.attend(
        q, kv, indices, base2(scale), sink, length, num_kv=num_kv,
        config=kernel_sm90.Config(num_ctas=INTERPRETED_CTAS),
        interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip


def base2(scale: float) -> Any:
    """The kernel's scale: from q.k to base-2 logits, on the host so that it costs no launch."""
    return np.full((1,), scale * math.log2(math.e), np.float32)


_ATTEND = {
    "xla": _attend_xla,
    "pallas": _attend_pallas,
    "pallas-interpret": _attend_interpreted,
}
