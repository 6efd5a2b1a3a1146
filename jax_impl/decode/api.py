"""The public entry point: checks, backend choice, and what all backends have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import backends
from jax_impl.arrays import is_traced, on_host
from jax_impl.decode import kernel_sm90, xla
from jax_impl.decode.arguments import D_V, Arguments, check
from jax_impl.decode.plan import DecodePlan
from jax_impl.decode.result import DecodeResult

if TYPE_CHECKING:
    from jaxtyping import Float, Int32


def dcp_decode(
    q: Float[Any, "T H 576"],
    kv_cache: Float[Any, "pages P 576"],
    block_table: Int32[Any, "B max_pages"],
    plan: DecodePlan,
    sm_scale: float,
    *,
    kv_scale: Any = None,
    q_scale: Any = None,
    out_dtype: Any = None,
    backend: str = "auto",
) -> DecodeResult:
    """Causal MLA decode of a ragged batch over the keys that one DCP rank holds.

    With z = sm_scale * q_scale * kv_scale * (q . key) over the first plan.row_keys local keys of
    the row's request, in natural units:

        lse = ln sum exp(z),   out = kv_scale * sum exp(z) value / sum exp(z)

    where the value of a key is its first 512 columns. `merge_states` makes the result of all
    keys from those of all ranks.

    Args:
      q: [T, H, 576] queries (512 latent columns, 64 of the rotary part), bfloat16, or
        float8_e4m3fn if the cache is too. H is the plan's. Rows past the plan's are padding.
      kv_cache: [pages, P, 576] bfloat16 or float8_e4m3fn, P 32, 64 or 128 and a multiple of the
        plan's interleave. Key and value in one row.
      block_table: [B, max_pages] int32, a row for each of the plan's requests. Entries behind a
        request's keys may hold anything, and so may cache rows behind its last key.
      plan: from `plan_decode`, for this rank.
      sm_scale: multiplies the dot product. At 0 every key has logit 0, a negative one is applied
        by negating q. Not a traced value.
      kv_scale, q_scale: what a stored number is to be multiplied by; a positive number or one
        float32, None is 1. In FlashInfer's terms bmm1_scale = sm_scale * q_scale * kv_scale and
        bmm2_scale = kv_scale. These two, and bmm1_scale unless sm_scale is 0, are to be normal
        float32 numbers, 1.2e-38 to 2.3e38 (the largest float32 over log2 e) in size. A traced
        one is not looked at inside jit: a negative one turns the order of the keys round and
        may give NaN, and so may any that leaves that range.
      out_dtype: bfloat16 (None) or float32, which keeps a merge over ranks free of rounding.
      backend: "auto" is the Pallas kernel on a Hopper GPU, and "xla" anywhere else.
        "pallas-interpret" runs the kernel's own body under Pallas' GPU interpreter, on the CPU.

    Arrays are JAX's or NumPy's (bfloat16 and float8_e4m3fn through ml_dtypes); any other that
    speaks DLPack is taken over without a copy if it is compact; the call then returns when it is
    done with that memory. Outside jit the values of plan and block_table are checked, which waits
    for them. Inside jit keys behind the width of the block table are left out, and a page number
    outside the cache acts as the nearest one.

    Returns:
      DecodeResult(out [T, H, 512], lse [T, H] float32 natural-log). A row without keys, and a
      row of padding: out 0, lse -inf. NaN in q or in one of its keys makes a (token, head) row
      NaN. A NaN among a request's keys but behind a row's last one leaves that row undefined.
      T = 0 gives empty arrays without a launch. On "pallas" and "pallas-interpret" a row all of
      whose logits lie under -6.9e29 counts as one without keys.

    Raises:
      ValueError: an argument of the wrong type, dtype or rank; arguments that don't fit the
        plan or one another; a block table too narrow for a request's keys, or that names a page
        outside the cache; a page size that the interleave doesn't divide; scales, or a product
        of them, outside the range above.
      NotImplementedError: another width, page size or out_dtype, or a backend that this machine
        can't run.
    """
    arguments = check(
        q, kv_cache, block_table, plan, sm_scale,
        kv_scale=kv_scale, q_scale=q_scale, out_dtype=out_dtype,
    )  # fmt: skip
    tokens, heads, _ = arguments.q.shape
    attend = _ATTEND[backends.resolve(backend)]
    rows = plan.num_rows
    if 0 in (rows, arguments.kv_cache.size, arguments.block_table.size):
        return _without_keys(tokens, heads, arguments.out_dtype)
    # The masked score -inf must stay -inf when scaled, and the running maximum a maximum.
    queries = -arguments.q if arguments.sm_scale < 0 else arguments.q
    if arguments.sm_scale == 0:
        queries = queries * 0  # makes all scores 0 and leaves NaN what it is
    result = attend(arguments._replace(q=queries))
    if arguments.shared and not is_traced(*result):
        jax.block_until_ready(result)
    return result


def _without_keys(tokens: int, heads: int, dtype: Any) -> DecodeResult:
    return DecodeResult(
        jnp.zeros((tokens, heads, D_V), dtype), jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    )


def _attend_xla(arguments: Arguments) -> DecodeResult:
    rows = arguments.plan.row_request, arguments.plan.row_keys
    if padding := arguments.q.shape[0] - arguments.plan.num_rows:
        pad = np.pad if on_host(*rows) else jnp.pad
        rows = (pad(row, (0, padding)) for row in rows)  # 0 keys
    return xla.attend(
        arguments.q,
        arguments.kv_cache,
        arguments.block_table,
        *rows,
        arguments.logit_scale,
        arguments.kv_scale,
        out_dtype=arguments.out_dtype,
    )


def _attend_pallas(arguments: Arguments) -> DecodeResult:
    return _attend_by_kernel(arguments, interpret=None)


def _attend_interpreted(arguments: Arguments) -> DecodeResult:
    arrays = tuple(arguments)[:4]
    if not is_traced(*jax.tree.leaves(arrays)):
        arrays = jax.device_put(arrays, jax.local_devices(backend="cpu")[0])
    q, kv_cache, block_table, plan = arrays
    arguments = arguments._replace(q=q, kv_cache=kv_cache, block_table=block_table, plan=plan)
    return _attend_by_kernel(arguments, interpret=plgpu.InterpretGPUParams())


def _attend_by_kernel(arguments: Arguments, *, interpret: Any) -> DecodeResult:
    (tokens, heads, _), rows = arguments.q.shape, arguments.plan.num_rows
    result = kernel_sm90.attend(
        arguments.q[:rows],
        arguments.kv_cache,
        arguments.block_table,
        arguments.plan,
        arguments.logit_scale,
        arguments.kv_scale,
        out_dtype=arguments.out_dtype,
        interpret=interpret,
    )
    if rows < tokens:
        padding = _without_keys(tokens - rows, heads, arguments.out_dtype)
        result = jax.tree.map(lambda *parts: jnp.concatenate(parts), result, padding)
    return result


_ATTEND = {
    "xla": _attend_xla,
    "pallas": _attend_pallas,
    "pallas-interpret": _attend_interpreted,
}
