"""One stage of the V4 path: what an implementation is given and what it gives back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from compare.protocol.hashing import add_array
from compare.protocol.inputs import Inputs, Result


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4StagesResult(Result):
    """What one stage of the path gives back, by name.

    combine: indices [T, C] int32, lengths [T] int32. global_topk: slots [T, topk] int32, lengths
    [T] int32. gather: workspace [n, M, D] bfloat16, whole. paged_swa, c128, dspark: slots
    [T, width] int32, lengths [T] int32. quantise: cache, whole, as it was given.
    """

    arrays: Mapping[str, np.ndarray]


Argument = np.ndarray | int | str | None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class V4StagesInputs(Inputs):
    """Arguments of one stage of the path, by name; all arrays are int32 unless said.

    combine: topk_indices [T, topk'], query_start_loc [n + 1] (may begin above 0),
        seq_lens [n], gather_lens [n], window, compress_ratio, topk (0: none of topk_indices is
        used), workspace_rows M, compressed_rows N; image_left, image_right [T] (None: no images):
        how many positions of its image each token has before and after its own, and
        max_image_tokens.
    global_topk: topk_indices [T, topk] with -1 behind each row's entries,
        token_to_request [T], block_table [n, columns], page_size, is_valid_token bool [T].
    gather: cache uint8 [pages, page stride] or bfloat16 [pages, P, D], page_size, kv_format
        ("v4-fp8" or "bf16", of D = 512; "v3.2-fp8" or "bf16-576", of D = 576), block_table
        [n, columns], seq_lens [n], gather_lens [n] or None (the lengths), offset, workspace
        bfloat16 [n, M, D]: what stands there before.
    paged_swa, c128, dspark: query_start_loc [n + 1], seq_lens [n], block_table [n, columns],
        page_size, slot_mapping [T], negative for padding. paged_swa, with window and width, and
        dspark, with window and num_speculative_tokens, may have more rows T than the batch has
        tokens, all of padding; c128, with width and compress_ratio, hasn't. paged_swa: also
        image_left, image_right [T] or None, as in combine, and replay_start [n] or None (0).
    quantise: cache, page_size, kv_format as of gather, values float32 [T, D], slot_mapping [T], -1
        for a row that is skipped.
    """

    stage: str
    arguments: Mapping[str, Argument]

    def sha256(self) -> str:
        """Hash of the stage's name and of names, dtypes, shapes and values of its arguments."""
        digest = hashlib.sha256(f"stage={self.stage}".encode())
        for name, value in sorted(self.arguments.items()):
            if isinstance(value, np.ndarray):
                add_array(digest, name, value)
            else:
                digest.update(f" {name}={value!r}".encode())
        return digest.hexdigest()
