"""The batches of the bench of the V4 path, and what follows from their sizes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_impl.kv_cache import FORMATS
from jax_impl.planning import PrefillChunk, plan_prefill_chunks
from jax_impl.prefill.indices import combined_width

FORMAT, D, WINDOW, PAGE = "v4-fp8", 512, 128, 64
TOKEN_BYTES = 584
ROW_BYTES = D * 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests of the same size, the last `tokens` of each one's context being prefilled.

    ratio 1: a layer with a window alone, topk 0.
    """

    requests: int
    tokens: int
    context: int
    h: int
    ratio: int
    topk: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A shape written as six numbers. Raises ValueError."""
        words = text.split(",")
        if len(words) != 6 or not all(word.strip().isdecimal() for word in words):
            raise ValueError(
                f"{text!r} isn't a shape; accepted are requests,tokens,context,h,ratio,topk or five"
            )
        shape = cls(*map(int, words))
        if min(shape.requests, shape.tokens) < 1 or not 1 <= shape.h <= 128:
            raise ValueError(
                f"{text!r} isn't a shape; accepted are requests and tokens, h 1 to 128"
            )
        if shape.tokens > shape.context:
            raise ValueError(f"{text!r} isn't a shape; accepted are at most context tokens")
        if shape.ratio not in (1, 2, 4, 128) or (shape.topk == 0) != (shape.ratio == 1):
            raise ValueError(
                f"{text!r} isn't a shape; accepted are ratio 1 with topk 0, and 2, 4 and 128"
            )
        if shape.entries == 0 and shape.has_compressed:
            raise ValueError(f"{text!r} isn't a shape; accepted are contexts of a whole entry")
        return shape

    @property
    def case(self) -> str:
        return (
            f"v4-prefill:n={self.requests},q={self.tokens},seq={self.context},h={self.h},"
            f"ratio={self.ratio},topk={self.topk}"
        )

    @property
    def has_compressed(self) -> bool:
        return self.ratio > 1

    @property
    def num_tokens(self) -> int:
        return self.requests * self.tokens

    @property
    def entries(self) -> int:
        """Compressed entries of a request."""
        return self.context // self.ratio if self.has_compressed else 0

    @property
    def window_rows(self) -> int:
        """Window rows of a request: its tokens' own, and what the first of them sees before."""
        return self.tokens + min(self.context - self.tokens, WINDOW - 1)

    @property
    def compressed_page(self) -> int:
        return 256 // self.ratio

    @property
    def list_columns(self) -> int:
        return combined_width(self.topk, WINDOW)

    @property
    def positions(self) -> np.ndarray:
        """[tokens], of each request's tokens."""
        return np.arange(self.context - self.tokens, self.context)

    @property
    def flop(self) -> float:
        """2 (D + Dv) for each token, head and key that is seen."""
        seen = np.minimum((self.positions + 1) // self.ratio, self.topk)
        keys = seen + np.minimum(self.positions + 1, WINDOW)
        return float(self.requests * keys.sum() * self.h * 2 * (D + D))

    @property
    def engine(self) -> dict[str, Any]:
        """Limits of an engine in which the batch is one full step."""
        return {"max_model_len": self.context, "max_num_batched_tokens": self.num_tokens}

    @property
    def plan(self) -> tuple[PrefillChunk, ...]:
        return plan_prefill_chunks(
            [self.context] * self.requests,
            [self.tokens] * self.requests,
            compress_ratio=self.ratio,
            window=WINDOW,
            **self.engine,
        )

    @property
    def query_start_loc(self) -> np.ndarray:
        return np.arange(self.requests + 1, dtype=np.int32) * self.tokens

    @property
    def workspace_shape(self) -> tuple[int, int, int]:
        """Of the only chunk. NotImplementedError if there are several."""
        plan = self.plan
        if len(plan) != 1:
            raise NotImplementedError(
                f"stages alone are timed in one chunk; the plan has {len(plan)}"
            )
        return plan[0].end - plan[0].start, plan[0].workspace_rows, D

    @property
    def workspace_bytes(self) -> int:
        """Of the largest chunk."""
        return max((chunk.end - chunk.start) * chunk.workspace_rows for chunk in self.plan) * (
            ROW_BYTES
        )

    @property
    def list_bytes(self) -> int:
        """Of the largest chunk: its lists and their lengths."""
        tokens = max(chunk.query_end - chunk.query_start for chunk in self.plan)
        return tokens * (self.list_columns + 1) * 4

    @property
    def result_bytes(self) -> int:
        """out in bfloat16, max_logits and lse in float32."""
        return self.num_tokens * self.h * (D * 2 + 2 * 4)

    @property
    def gather_bytes(self) -> tuple[int, int]:
        """(read, written) by the gather: 584 bytes a token of the caches, 1 KiB a row."""
        rows = self.requests * (self.entries + self.window_rows)
        return rows * TOKEN_BYTES, rows * ROW_BYTES

    def columns(self, page: int, length: int) -> int:
        return -(-length // page)

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The path's operands as JAX compiles for them, by Data's names."""
        layout, n = FORMATS[FORMAT], self.requests
        columns = self.columns(PAGE, self.context)
        found: dict[str, Any] = {
            "q": ((self.num_tokens, self.h, D), "bfloat16"),
            "swa_cache": (layout.cache_shape(n * columns, PAGE), "uint8"),
            "swa_block_table": ((n, columns), "int32"),
            "seq_lens": ((n,), "int32"),
        }
        if self.has_compressed:
            columns, page = self.columns(self.compressed_page, self.entries), self.compressed_page
            found |= {
                "compressed_cache": (layout.cache_shape(n * columns, page), "uint8"),
                "compressed_block_table": ((n, columns), "int32"),
                "topk_indices": ((self.num_tokens, self.topk), "int32"),
            }
        return {name: jax.ShapeDtypeStruct(*words) for name, words in found.items()}


FIVE = tuple(
    Shape(*words)
    for words in (
        (4, 1024, 65536, 64, 4, 512),
        (4, 1024, 65536, 128, 4, 512),
        (1, 4096, 16384, 64, 4, 1024),
        (4, 1024, 65536, 64, 128, 512),
        (4, 1024, 65536, 64, 1, 0),
    )
)
