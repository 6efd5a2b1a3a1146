"""What an implementation of DeepSeek-V4's prefill path is given: the whole path, or one stage of
it. Arrays are NumPy (bfloat16 through ml_dtypes)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from compare.cases.case import Case
from compare.cases.hashing import add_array

Spans = tuple[tuple[int, int], ...]
"""Images of one request: (first, last) positions, both inclusive."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4PrefillInputs:
    """Arguments of one sparse prefill over paged caches; n requests of T tokens.

    q [T, H, 512] bfloat16. query_start_loc [n + 1] int32: request i has the rows
    query_start_loc[i] - query_start_loc[0] to query_start_loc[i + 1] - query_start_loc[0]; the
    first entry may be above 0. seq_lens [n] int32: tokens of context, this step's included.
    seq_lens_bound [n] int32: what the host knows of them when it plans, none smaller; None: the
    lengths themselves.
    swa_cache, compressed_cache: uint8 [pages, page stride in bytes] with kv_format "v4-fp8",
    bfloat16 [pages, P, 512] with "bf16"; P is swa_page and compressed_page. Position p of request i
    is token p % P of page block_table[i, p // P], and so is compressed entry c of its own cache and
    table (int32 [n, columns]; a column that no token of the request needs holds anything).
    compressed_*: None where there is no compressed cache (compress_ratio 1).
    topk_indices [T, topk] int32: the compressed entries that token t at position pos chose, the
    first min((pos + 1) // compress_ratio, topk) of its row, distinct and all visible to it; the
    rest of the row is -1. None without a compressed cache.
    attn_sink [H] float32 natural-log units, or None. sm_scale float, natural units. window: how
    many positions a token sees, its own included. image_spans: a tuple for each request, all of
    whose images lie in this step's tokens and have at most max_image_tokens positions; None: no
    images.
    max_model_len, max_num_batched_tokens, chunk_size: of the chunk planner. plan_rules: fixed,
    alone (each request a chunk of its own) or vllm-0.33.0.
    case: where the inputs came from; None for a caller's own tensors.
    """

    q: np.ndarray
    swa_cache: np.ndarray
    swa_block_table: np.ndarray
    swa_page: int
    compressed_cache: np.ndarray | None = None
    compressed_block_table: np.ndarray | None = None
    compressed_page: int | None = None
    kv_format: str = "v4-fp8"
    topk_indices: np.ndarray | None = None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    seq_lens_bound: np.ndarray | None = None
    attn_sink: np.ndarray | None = None
    sm_scale: float
    compress_ratio: int
    window: int = 128
    image_spans: tuple[Spans, ...] | None = None
    max_image_tokens: int = 0
    max_model_len: int
    max_num_batched_tokens: int
    chunk_size: int = 4
    plan_rules: str = "fixed"
    case: Case | None = None

    def sha256(self) -> str:
        """Hash of names, dtypes, shapes and values of every argument."""
        digest = hashlib.sha256(f"sm_scale={float(self.sm_scale).hex()}".encode())
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in V4_PREFILL_ARRAYS:
                add_array(digest, field.name, value)
            elif field.name not in ("sm_scale", "case"):
                digest.update(f" {field.name}={value!r}".encode())
        return digest.hexdigest()


V4_PREFILL_ARRAYS = (
    "q",
    "swa_cache",
    "swa_block_table",
    "compressed_cache",
    "compressed_block_table",
    "topk_indices",
    "query_start_loc",
    "seq_lens",
    "seq_lens_bound",
    "attn_sink",
)

Argument = np.ndarray | int | str | None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4StagesInputs:
    """Arguments of one stage of the path, by name; all arrays are int32 unless said.

    combine: topk_indices [T, topk'], query_start_loc [n + 1] (may begin above 0),
        seq_lens [n], gather_lens [n], window, compress_ratio, topk (0: none of topk_indices is
        used), workspace_rows M, compressed_rows N; image_left, image_right [T] (None: no images):
        how many positions of its image each token has before and after its own, and
        max_image_tokens.
    global_topk: topk_indices [T, topk] with -1 behind each row's entries,
        token_to_request [T], block_table [n, columns], page_size, is_valid_token bool [T].
    gather: cache uint8 [pages, page stride] or bfloat16 [pages, P, 512], page_size,
        kv_format ("v4-fp8" or "bf16"), block_table [n, columns], seq_lens [n], gather_lens [n] or
        None (the lengths), offset, workspace bfloat16 [n, M, 512]: what stands there before.
    case: where the inputs came from; None for a caller's own tensors.
    """

    stage: str
    arguments: Mapping[str, Argument]
    case: Case | None = None

    def sha256(self) -> str:
        """Hash of the stage's name and of names, dtypes, shapes and values of its arguments."""
        digest = hashlib.sha256(f"stage={self.stage}".encode())
        for name, value in sorted(self.arguments.items()):
            if isinstance(value, np.ndarray):
                add_array(digest, name, value)
            else:
                digest.update(f" {name}={value!r}".encode())
        return digest.hexdigest()
