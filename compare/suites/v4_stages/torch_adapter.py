"""torch_ref's stages of the V4 path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compare.houses.torch_backend import TorchDevice, torch_device
from compare.protocol import arrays as convert
from compare.suites.v4_stages.call import V4StagesResult
from compare.suites.v4_stages.case import STAGES
from compare.suites.v4_stages.implementation import V4Stages


class TorchV4Stages(TorchDevice, V4Stages):
    """torch_ref's index builders and its gather."""

    functions = ("torch_ref.indices:combine_topk_swa_indices", "torch_ref.kv_cache:gather_kv")

    def stage(self, stage: str, arguments: dict[str, Any]) -> V4StagesResult:
        from torch_ref.indices import combine_topk_swa_indices, global_topk_slots
        from torch_ref.kv_cache import gather_kv

        functions = {
            "combine": combine_topk_swa_indices,
            "global_topk": global_topk_slots,
            "gather": gather_kv,
            "paged_swa": _paged_swa,
            "c128": _c128,
            "dspark": _dspark,
            "quantise": _quantise,
        }
        return run_stage(functions[stage], stage, arguments, torch_device(self.device))


def run_stage(
    function: Callable[..., Any], stage: str, arguments: dict[str, Any], device: str
) -> V4StagesResult:
    """A stage by a function with the signature that torch_ref's own has; its arguments are copied,
    since a gather writes into the workspace.
    """
    from torch_ref.kv_cache import PagedKV

    given: dict[str, Any] = {
        name: convert.to_torch(value, device, copy=True) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    if stage == "gather":
        paged = PagedKV(given.pop("cache"), given.pop("page_size"), given.pop("kv_format"))
        found: tuple[Any, ...] = (function(paged, **given),)
    else:
        found = function(**given)
    return V4StagesResult(
        arrays={n: convert.to_numpy(a, n) for n, a in zip(STAGES[stage], found, strict=True)}
    )


def _paged_swa(
    *, replay_start: Any, image_left: Any, image_right: Any, **given: Any
) -> tuple[Any, Any]:
    from torch_ref.indices import paged_swa_indices

    starts = given["query_start_loc"]
    tokens = int(starts[-1] - starts[0])
    left, right = (None if image is None else image[:tokens] for image in (image_left, image_right))
    replay = None if replay_start is None else replay_start.tolist()
    return paged_swa_indices(image_left=left, image_right=right, replay_start=replay, **given)


def _c128(*, query_start_loc: Any, seq_lens: Any, **given: Any) -> tuple[Any, Any]:
    from torch_ref.indices import c128_global_slots, token_batch

    batch = token_batch(query_start_loc, seq_lens)
    return c128_global_slots(batch.position, batch.request.int(), **given)


def _dspark(*, num_speculative_tokens: int, **given: Any) -> tuple[Any, Any]:
    from torch_ref.indices import dspark_indices

    return dspark_indices(num_spec=num_speculative_tokens, **given)


def _quantise(*, cache: Any, page_size: int, kv_format: str, **given: Any) -> tuple[Any]:
    from torch_ref.kv_cache import PagedKV, insert_kv

    return (insert_kv(PagedKV(cache, page_size, kv_format), **given).cache,)
