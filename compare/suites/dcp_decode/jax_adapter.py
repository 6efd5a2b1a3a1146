"""jax_impl's decode on each of its backends."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.houses.jax_backend import JaxBackend, compiled_launch, import_jax, jax_device
from compare.houses.ranks import merge_by_jax
from compare.protocol.timing import Launch
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.implementation import DcpDecode

INTERPRETER_BLOCKS = 64

KEYS, ROWS = 128, 64  # of one pair of blocks of the kernel: keys, (token, head) rows


class JaxDcpDecode(JaxBackend, DcpDecode):
    """jax_impl.dcp_decode on one backend. config: another tuning of the Hopper kernel, to be
    timed under a name of its own.
    """

    functions = ("jax_impl:dcp_decode",)
    most_blocks, block, rows = INTERPRETER_BLOCKS, (KEYS, ROWS), "(token, head) rows"
    merge = staticmethod(merge_by_jax)

    def __init__(self, name: str, device: str | None = None, *, config: Any = None) -> None:
        super().__init__(name, device)
        self._config = config

    def refuses(self, case: DcpDecodeCase) -> str | None:
        from jax_impl.decode.arguments import PAGE_SIZES

        if case.page not in PAGE_SIZES:
            accepted = ", ".join(map(str, PAGE_SIZES))
            return f"page = {case.page}: jax_impl's decode takes pages of {accepted} keys"
        return self.too_large(case.blocks)

    def call(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        return self._call(inputs, "bfloat16")

    def call_shard(self, inputs: DcpDecodeInputs) -> DcpDecodeResult:
        return self._call(inputs, "float32")

    def _call(self, inputs: DcpDecodeInputs, out_dtype: str) -> DcpDecodeResult:
        jax = import_jax()
        from jax_impl import dcp_decode

        decode: Any = dcp_decode  # NumPy arrays are as welcome as jax's
        plan = plan_of(inputs)
        compiled = self.compilation(max(inputs.q.size, inputs.kv_cache.size))
        with jax.default_device(jax_device(self.device)), compiled:
            out, lse = decode(
                inputs.q,
                inputs.kv_cache,
                inputs.block_table,
                plan,
                inputs.sm_scale,
                kv_scale=inputs.kv_scale,
                q_scale=inputs.q_scale,
                out_dtype=out_dtype,
                backend=self.name,
            )
            return as_result((out, lse))

    def prepare(self, inputs: DcpDecodeInputs) -> Launch:
        """One rank's call compiled, its plan made before."""
        scales = {"kv_scale": inputs.kv_scale, "q_scale": inputs.q_scale}

        def decode(plan: Any, q: Any, kv_cache: Any, block_table: Any) -> Any:
            if self._config is None:
                from jax_impl import dcp_decode

                given = (q, kv_cache, block_table, plan, inputs.sm_scale)
                return tuple(dcp_decode(*given, backend=self.name, **scales))
            from jax_impl.decode.kernel_sm90.launch import attend

            logits = np.float32(inputs.sm_scale * (inputs.q_scale or 1) * (inputs.kv_scale or 1))
            values = np.float32(inputs.kv_scale or 1)
            given = (q, kv_cache, block_table, plan, logits, values)
            return attend(*given, out_dtype="bfloat16", config=self._config)

        arguments = (plan_of(inputs), inputs.q, inputs.kv_cache, inputs.block_table)
        return compiled_launch(decode, arguments, self.device, as_result)


def plan_of(inputs: DcpDecodeInputs) -> Any:
    """jax_impl's plan of one rank's call."""
    from jax_impl import plan_decode

    return plan_decode(
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.total_lens,
        max_query_len=inputs.max_query_len,
        heads=inputs.q.shape[1],
        dcp_rank=inputs.dcp_rank,
        dcp_world=inputs.dcp_world,
        interleave=inputs.interleave,
        causal=inputs.causal,
    )


def as_result(found: Any) -> DcpDecodeResult:
    """(out, lse) of JAX as the judge's result."""
    out, lse = map(np.asarray, found)
    return DcpDecodeResult(out=out, lse=lse)
