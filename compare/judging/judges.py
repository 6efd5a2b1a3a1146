"""The judge of each suite."""

from __future__ import annotations

from types import ModuleType

from compare.judging import (
    dcp_decode,
    decode_plan,
    prefill_plan,
    sparse_prefill,
    v4_prefill,
    v4_stages,
)

JUDGES: dict[str, ModuleType] = {
    "sparse-prefill": sparse_prefill,
    "prefill-plan": prefill_plan,
    "dcp-decode": dcp_decode,
    "decode-plan": decode_plan,
    "v4-prefill": v4_prefill,
    "v4-stages": v4_stages,
}
"""By suite: a module with judge(inputs, candidate, reference, *, profile, evidence), and where
evidence is worth sharing among candidates with Evidence(inputs, device).
"""
