"""DCP causal MLA decode: ragged batches over a sharded, paged KV cache, and merging of ranks."""

from jax_impl.backends import BACKENDS, unsupported_reason
from jax_impl.decode.api import dcp_decode
from jax_impl.decode.merge import lse_from_base2, lse_rows, merge_states
from jax_impl.decode.plan import DecodeCapacity, DecodePlan, plan_decode
from jax_impl.decode.result import DecodeResult

__all__ = [
    "BACKENDS",
    "DecodeCapacity",
    "DecodePlan",
    "DecodeResult",
    "dcp_decode",
    "lse_from_base2",
    "lse_rows",
    "merge_states",
    "plan_decode",
    "unsupported_reason",
]
