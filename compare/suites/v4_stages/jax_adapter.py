"""jax_impl's stages of the V4 path on each of its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compare.houses.jax_backend import (
    INTERPRETER,
    JaxBackend,
    import_jax,
    jax_device,
)
from compare.suites.v4_stages.call import V4StagesResult
from compare.suites.v4_stages.case import STAGES, V4StagesCase
from compare.suites.v4_stages.implementation import V4Stages

INTERPRETER_TOKENS = 1024
"""Tokens that the interpreter gathers for one stage."""


class JaxV4Stages(JaxBackend, V4Stages):
    """jax_impl's gather on one backend; with xla its index builders too, which have no other."""

    functions = (
        "jax_impl.kv_cache:gather_kv",
        "jax_impl.prefill.indices:combine_topk_swa_indices",
    )

    def refuses(self, case: V4StagesCase) -> str | None:
        if case.stage != "gather" and self.name != "xla":
            return f"stage={case.stage} has no kernel: xla computes it on every backend"
        if self.name != INTERPRETER or case.recorded:
            return None
        batch = case.batch()
        requests = range(len(case.seq))
        compressed = case.ratio > 1
        tokens = sum(batch.compressed(i) if compressed else batch.gathered(i) for i in requests)
        if tokens <= INTERPRETER_TOKENS:
            return None
        return f"the interpreter gathers at most {INTERPRETER_TOKENS} tokens; these are {tokens}"

    def stage(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        jax = import_jax()
        from jax_impl.kv_cache import PagedKV, gather_kv, insert_kv
        from jax_impl.prefill import indices as lists

        functions: dict[str, Callable[..., Any]] = {
            "combine": lists.combine_topk_swa_indices,
            "global_topk": lists.global_topk_slots,
            "paged_swa": lists.paged_swa_indices,
            "c128": lists.c128_global_slots,
            "dspark": lists.dspark_indices,
        }
        given: dict[str, Any] = arguments
        largest = max(v.size for v in given.values() if isinstance(v, np.ndarray))
        with jax.default_device(jax_device(self.device)), self.compilation(largest):
            if stage == "gather":
                paged = PagedKV(given.pop("cache"), given.pop("page_size"), given.pop("kv_format"))
                found = {"workspace": gather_kv(paged, **given, backend=self.name)}
            elif stage == "quantise":
                paged = PagedKV(given.pop("cache"), given.pop("page_size"), given.pop("kv_format"))
                # torch_ref and engines write powers of two alone.
                rule = "power-of-two" if paged.kv_format.endswith("fp8") else None
                found = {"cache": insert_kv(paged, **given, scale_rule=rule).cache}
            else:
                found = dict(zip(STAGES[stage], functions[stage](**given), strict=True))
            return V4StagesResult(arrays={name: np.asarray(a) for name, a in found.items()})
