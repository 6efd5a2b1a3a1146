"""jax_impl's decode on each of its backends."""

from __future__ import annotations

from typing import Any

import numpy as np

from compare.houses.jax_backend import JaxBackend, import_jax, jax_device
from compare.houses.ranks import merge_by_jax
from compare.suites.dcp_decode.call import DcpDecodeInputs, DcpDecodeResult
from compare.suites.dcp_decode.case import DcpDecodeCase
from compare.suites.dcp_decode.implementation import DcpDecode

INTERPRETER_BLOCKS = 64

KEYS, ROWS = 128, 64  # of one pair of blocks of the kernel: keys, (token, head) rows


class JaxDcpDecode(JaxBackend, DcpDecode):
    """jax_impl.dcp_decode on one backend."""

    functions = ("jax_impl:dcp_decode",)
    most_blocks, block, rows = INTERPRETER_BLOCKS, (KEYS, ROWS), "(token, head) rows"
    merge = staticmethod(merge_by_jax)

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
        from jax_impl import dcp_decode, plan_decode

        decode: Any = dcp_decode  # NumPy arrays are as welcome as jax's
        plan = plan_decode(
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
        with jax.default_device(jax_device(self.device)), self.compilation():
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
            return DcpDecodeResult(out=np.asarray(out), lse=np.asarray(lse))
