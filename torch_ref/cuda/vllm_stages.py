"""The stages of an importable vLLM's V4 prefill, as they are, behind torch_ref's names.

Five of the engine's functions can be called alone: those that combine index lists, map top-k
entries to slots, gather and insert keys, and map tokens to requests. What it launches from inside a
metadata builder (the paged window, image visibility) can't. They are Triton kernels: tensors on a
CUDA GPU, or anywhere under TRITON_INTERPRET=1. As with the planner, a vLLM whose function has moved
or wants more is refused with what was looked for.

These functions check shapes through torch_ref's own types and no values: what the engine makes of a
hazard is the engine's answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import BFloat16, Bool, Int, Int32
from torch import Tensor

from torch_ref.cuda.vllm_adapter import version
from torch_ref.kv_cache import PagedKV

Stage = Literal["combine", "global_topk", "gather", "insert", "token_to_request"]

_OPS = "vllm.models.deepseek_v4.common.ops.cache_utils"


@dataclass(frozen=True)
class _Function:
    module: str
    name: str
    parameters: tuple[str, ...]


_FUNCTIONS: dict[str, _Function] = {
    "combine": _Function(
        _OPS,
        "combine_topk_swa_indices",
        (
            "topk_indices",
            "query_start_loc",
            "seq_lens",
            "gather_lens",
            "window_size",
            "compress_ratio",
            "topk",
            "M",
            "N",
        ),
    ),
    "global_topk": _Function(
        _OPS,
        "compute_global_topk_indices_and_lens",
        ("topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token"),
    ),
    "gather": _Function(
        _OPS,
        "dequantize_and_gather_k_cache",
        ("out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset"),
    ),
    "insert": _Function(
        _OPS, "quantize_and_insert_k_cache", ("k", "k_cache", "slot_mapping", "block_size")
    ),
    "token_to_request": _Function(
        "vllm.v1.attention.ops.metadata",
        "compute_token_to_req_indices",
        ("query_start_loc", "out", "num_mapped_tokens", "num_tokens"),
    ),
}


def unsupported_reason(stage: Stage, *, kv_format: str | None = None) -> str | None:
    """None, or in a sentence why this stage of vLLM can't be run here."""
    try:
        _find(stage)
    except NotImplementedError as error:
        return str(error)
    if stage in ("gather", "insert") and kv_format not in (None, "v4-fp8"):
        return f"kv_format = {kv_format!r}: vLLM's {stage} is for v4-fp8 pages"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "vLLM's stages are Triton kernels and torch sees no CUDA GPU"
    return None


def combine_topk_swa_indices(
    topk_indices: Int32[Tensor, "T columns"] | None,
    query_start_loc: Int32[Tensor, " n+1"],
    seq_lens: Int32[Tensor, " n"],
    gather_lens: Int32[Tensor, " n"],
    *,
    window: int,
    compress_ratio: int,
    topk: int,
    workspace_rows: int,
    compressed_rows: int,
    image_left: Int32[Tensor, " T"] | None = None,
    image_right: Int32[Tensor, " T"] | None = None,
    max_image_tokens: int = 0,
) -> tuple[Int32[Tensor, "T C"], Int32[Tensor, " T"]]:
    """vLLM's combine_topk_swa_indices; arguments and results as torch_ref.indices has them.

    NotImplementedError: no vLLM, one whose function isn't as known, or images with one that knows
    none.
    """
    function = _find("combine")
    if topk_indices is None:
        # The engine takes the number of tokens from this tensor, whether it reads it or not.
        tokens = int(query_start_loc[-1] - query_start_loc[0])
        topk_indices = query_start_loc.new_full((tokens, 1), -1)
    images: dict[str, Any] = {}
    if image_left is not None or image_right is not None or max_image_tokens:
        images = {
            "left_visible": image_left,
            "right_visible": image_right,
            "max_image_tokens": max_image_tokens,
        }
        if not images.keys() <= inspect.signature(function).parameters.keys():
            raise NotImplementedError(
                f"vLLM {version()}: combine_topk_swa_indices knows no images (looked for "
                f"{', '.join(images)})"
            )
    return function(
        topk_indices=topk_indices,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        window_size=window,
        compress_ratio=compress_ratio,
        topk=topk,
        M=workspace_rows,
        N=compressed_rows,
        **images,
    )


def global_topk_slots(
    topk_indices: Int32[Tensor, "T K"],
    token_to_request: Int32[Tensor, " T"],
    block_table: Int32[Tensor, "n columns"],
    *,
    page_size: int,
    is_valid_token: Bool[Tensor, " T"] | None = None,
) -> tuple[Int32[Tensor, "T K"], Int32[Tensor, " T"]]:
    """vLLM's compute_global_topk_indices_and_lens, as torch_ref.indices.global_topk_slots."""
    if is_valid_token is None:
        is_valid_token = torch.ones_like(token_to_request, dtype=torch.bool)
    return _find("global_topk")(
        topk_indices=topk_indices,
        token_to_req_indices=token_to_request,
        block_table=block_table,
        block_size=page_size,
        is_valid_token=is_valid_token,
    )


def gather_kv(
    paged: PagedKV,
    block_table: Int32[Tensor, "n columns"],
    seq_lens: Int32[Tensor, " n"],
    workspace: BFloat16[Tensor, "n M D"],
    *,
    gather_lens: Int32[Tensor, " n"] | None = None,
    offset: int = 0,
) -> BFloat16[Tensor, "n M D"]:
    """vLLM's dequantize_and_gather_k_cache into `workspace`, as torch_ref.kv_cache.gather_kv."""
    _require_v4("gather", paged)
    P, token = paged.page_size, paged.layout.token_bytes
    pages = paged.cache.as_strided((paged.num_pages, P, token), (paged.cache.stride(0), token, 1))
    _find("gather")(
        out=workspace,
        k_cache=pages,
        seq_lens=seq_lens,
        gather_lens=gather_lens,
        # The engine takes the number of columns for the stride of a row.
        block_table=block_table.contiguous(),
        block_size=P,
        offset=offset,
    )
    return workspace


def insert_kv(
    paged: PagedKV, values: BFloat16[Tensor, "N 512"], slot_mapping: Int[Tensor, " N"]
) -> PagedKV:
    """vLLM's quantize_and_insert_k_cache on a copy, as torch_ref.kv_cache.insert_kv."""
    _require_v4("insert", paged)
    written = replace(paged, cache=paged.cache.clone(memory_format=torch.contiguous_format))
    _find("insert")(
        k=values,
        k_cache=written.cache,
        slot_mapping=slot_mapping.long(),
        block_size=paged.page_size,
    )
    return written


def token_to_request(
    query_start_loc: Int32[Tensor, " n+1"], num_tokens: int, *, num_mapped: int | None = None
) -> Int32[Tensor, " T"]:
    """vLLM's compute_token_to_req_indices, as torch_ref.indices.token_to_request."""
    return _find("token_to_request")(
        query_start_loc=query_start_loc - query_start_loc[0],
        out=query_start_loc.new_empty(num_tokens),
        num_mapped_tokens=num_tokens if num_mapped is None else num_mapped,
        num_tokens=num_tokens,
    )


def _require_v4(stage: Stage, paged: PagedKV) -> None:
    if paged.kv_format != "v4-fp8":
        raise NotImplementedError(
            f"kv_format = {paged.kv_format!r}: vLLM's {stage} is for v4-fp8 pages"
        )


def _find(stage: Stage) -> Callable[..., Any]:
    """The engine's function; NotImplementedError says what is missing or different."""
    wanted = _FUNCTIONS[stage]
    if importlib.util.find_spec("vllm") is None:
        raise NotImplementedError("vllm isn't importable here")
    try:
        module = importlib.import_module(wanted.module)
    except Exception as error:  # importing an engine can fail in any way; none of them is ours
        raise NotImplementedError(
            f"vLLM {version()}: {wanted.module} doesn't import ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, wanted.name, None)
    if function is None:
        raise NotImplementedError(f"vLLM {version()}: {wanted.module} has no {wanted.name}")
    parameters = inspect.signature(function).parameters
    absent = [name for name in wanted.parameters if name not in parameters]
    unknown = [
        name
        for name, parameter in parameters.items()
        if name not in wanted.parameters
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if absent or unknown:
        raise NotImplementedError(
            f"vLLM {version()}: {wanted.name}({', '.join(parameters)}) isn't as known: "
            + "; ".join(
                f"{what} {', '.join(names)}"
                for what, names in (("looked for", absent), ("can't fill", unknown))
                if names
            )
        )
    return function
