"""The public entry points of the gather: checks and backend choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import backends
from jax_impl.arrays import is_traced, on_host, to_jax_beside
from jax_impl.kv_cache import kernel_sm90, xla
from jax_impl.kv_cache.arguments import Arguments, check
from jax_impl.kv_cache.paged import PagedKV

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Int32


def gather_kv(
    paged: PagedKV,
    block_table: Int32[Any, "n columns"],
    seq_lens: Int32[Any, " n"],
    workspace: BFloat16[Any, "n M D"],
    *,
    gather_lens: Int32[Any, " n"] | None = None,
    offset: Any = 0,
    backend: str = "auto",
) -> BFloat16[Array, "n M D"]:
    """A workspace with the last gather_lens tokens of each request in it, dequantised.

    For request b and i in [0, gather_lens[b]), row offset + i of the result is the token at
    position seq_lens[b] - gather_lens[b] + i; all other rows are the workspace's, bit for bit
    (positions.py). Position p lies in page block_table[b, p // P] at p % P.

    Args:
      paged: the cache. Each cache has its own block table and page size.
      block_table: [n, columns] int32. Entries that no gathered token lies on may hold anything.
      seq_lens: [n] int32, tokens of each request that the cache holds.
      workspace: [n, M, D] bfloat16.
      gather_lens: [n] int32, at most seq_lens; None is all of them.
      offset: the first row, the same for all requests: an integer, or an int32 scalar.
      backend: "auto" is the Pallas kernel on a Hopper GPU, and "xla" anywhere else.
        "pallas-interpret" runs the kernel's own body under Pallas' GPU interpreter, on the CPU.

    Values are looked at outside jit, which waits for them. Inside jit rows that would lie outside
    the workspace, on either side, aren't written, and ones that would hold a token before the
    first are left as they are; a position behind the table's last column reads that column, and a
    page number outside the cache acts as the nearest one.

    Raises:
      ValueError: an argument of the wrong type, dtype or shape; lengths that are negative,
        larger than the request's seq_len, or that don't fit the workspace; a block table too
        narrow for the tokens, or that names a page outside the cache where they are.
      NotImplementedError: a backend that this machine can't run.
    """
    arguments = check(
        paged, block_table, seq_lens, workspace, gather_lens=gather_lens, offset=offset
    )
    backend = backends.resolve(backend)
    if arguments.is_empty:
        return arguments.workspace
    result = _GATHER[backend](arguments)
    if arguments.shared and not is_traced(result):
        jax.block_until_ready(result)
    return result


def gather_kv_into(
    paged: PagedKV,
    block_table: Int32[Any, "n columns"],
    seq_lens: Int32[Any, " n"],
    workspace: Any,
    *,
    gather_lens: Int32[Any, " n"] | None = None,
    offset: Any = 0,
    backend: str = "auto",
) -> None:
    """gather_kv into a ref: jax.new_ref(...), or jax.empty_ref(...) inside jit.

    Two caches can so be gathered into one workspace without a copy of it. Rows that nothing is
    gathered into keep what the ref held; in an empty ref that is undefined.
    """
    if not isinstance(workspace, jax.Ref):
        raise ValueError(
            "workspace must be a ref (jax.new_ref, jax.empty_ref) to bfloat16 [n, M, D]; got "
            f"{type(workspace).__name__}"
        )
    arguments = check(
        paged, block_table, seq_lens, workspace, gather_lens=gather_lens, offset=offset
    )
    backend = backends.resolve(backend)
    if not arguments.is_empty:
        _GATHER_INTO[backend](arguments)


def _gather_xla(arguments: Arguments) -> jax.Array:
    arrays = jax.tree.leaves(arguments[:5])
    if not is_traced(arguments.offset) and on_host(*arrays):
        return _gather_on_host(arguments)
    return xla.gather(*_operands(arguments))


def _gather_on_host(arguments: Arguments) -> jax.Array:
    workspace = np.array(arguments.workspace)
    paged, table, seq_lens, gather_lens = jax.tree.map(np.asarray, arguments[:4])
    xla.gather_on_host(
        paged, table, seq_lens, workspace, gather_lens=gather_lens, offset=arguments.offset
    )
    return to_jax_beside(workspace, arguments.workspace)


def _gather_xla_into(arguments: Arguments) -> None:
    workspace = arguments.workspace
    workspace[...] = _gather_xla(arguments._replace(workspace=workspace[...]))


def _gather_pallas(arguments: Arguments) -> jax.Array:
    return kernel_sm90.gather(*_operands(arguments))


def _gather_pallas_into(arguments: Arguments) -> None:
    kernel_sm90.gather_into(*_operands(arguments))


def _gather_interpreted(arguments: Arguments) -> jax.Array:
    operands = _operands(arguments)
    if not is_traced(*jax.tree.leaves(operands)):
        operands = jax.device_put(operands, jax.local_devices(backend="cpu")[0])
    return kernel_sm90.gather(*operands, interpret=plgpu.InterpretGPUParams())


def _gather_interpreted_into(arguments: Arguments) -> None:
    kernel_sm90.gather_into(*_operands(arguments), interpret=plgpu.InterpretGPUParams())


def _operands(arguments: Arguments) -> tuple[Any, ...]:
    return (
        arguments.paged,
        arguments.block_table,
        arguments.seq_lens,
        arguments.gather_lens,
        arguments.workspace,
        jnp.asarray(arguments.offset, jnp.int32),
    )


_GATHER = {
    "xla": _gather_xla,
    "pallas": _gather_pallas,
    "pallas-interpret": _gather_interpreted,
}
_GATHER_INTO = {
    "xla": _gather_xla_into,
    "pallas": _gather_pallas_into,
    "pallas-interpret": _gather_interpreted_into,
}
