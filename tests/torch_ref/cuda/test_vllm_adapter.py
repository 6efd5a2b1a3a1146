"""The adapter around an engine's planner: a fake engine with the real one's names and shapes."""

from __future__ import annotations

import pytest

from torch_ref.cuda import vllm_adapter
from torch_ref.planning import PrefillChunk

MODULE = "vllm.v1.attention.backends.mla.sparse_swa"
VERSION = '__version__ = "0.33.0"\n'
ENGINE = """
import dataclasses

@dataclasses.dataclass
class DeepseekSparseSWAMetadata:
    block_table: object
    block_size: int
    seq_lens: object = None
    num_prefills: int = 0
    prefill_seq_lens_cpu: object = None
    prefill_query_lens_cpu: object = None
    prefill_window_size: int = 0
    prefill_max_model_len: int = 0
    prefill_max_num_batched_tokens: int = 0
    cache: dict = dataclasses.field(default_factory=dict)

    def get_prefill_chunk_plan(self, {signature}):
        widths = (self.prefill_seq_lens_cpu - self.prefill_query_lens_cpu).tolist()
        self.seen = {seen}
        assert self.prefill_window_size == 8 and self.prefill_max_model_len == 64
        assert self.prefill_max_num_batched_tokens == 16
        return [(i, i + 1, compress_ratio, w + {seen}) for i, w in enumerate(widths)]
"""


def engine(signature: str, seen: str = "0") -> str:
    return ENGINE.replace("{signature}", signature).replace("{seen}", seen)


def plan(**changes):
    arguments = {
        "seq_lens": [40, 30],
        "query_lens": [5, 0],
        "compress_ratio": 4,
        "window": 8,
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "chunk_size": 3,
    }
    return vllm_adapter.plan_prefill_chunks(**(arguments | changes))


def test_no_vllm_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert vllm_adapter.unsupported_reason() == "vllm isn't importable here"
    assert vllm_adapter.version() is None
    with pytest.raises(NotImplementedError, match="vllm isn't importable here"):
        plan()


def test_the_planner_gets_its_fields_and_its_rows_become_chunks(install):
    signature = "compress_ratio, prefill_chunk_size, has_compressed=None"
    install(MODULE, engine(signature, "100 * prefill_chunk_size + (has_compressed or 0)"), VERSION)
    assert vllm_adapter.unsupported_reason() is None
    assert vllm_adapter.version() == "0.33.0"
    assert plan() == (PrefillChunk(0, 1, 4, 335, 0, 5), PrefillChunk(1, 2, 4, 330, 5, 5))
    assert plan(has_compressed=True)[0].workspace_rows == 336


def test_an_older_planner_without_has_compressed_serves_what_it_knows(install):
    install(MODULE, engine("compress_ratio, prefill_chunk_size"), VERSION)
    assert vllm_adapter.unsupported_reason() is None
    assert len(plan()) == len(plan(has_compressed=True)) == 2
    with pytest.raises(NotImplementedError, match=r"^has_compressed=True with compress_ratio=1"):
        plan(compress_ratio=1, has_compressed=True)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "vLLM 0.33.0: vllm.v1.attention.backends.mla.sparse_swa doesn't import (Module"),
        ("raise RuntimeError('no GPU')", "doesn't import (RuntimeError: no GPU)"),
        ("pass", "sparse_swa has no DeepseekSparseSWAMetadata.get_prefill_chunk_plan"),
        (
            "class DeepseekSparseSWAMetadata:\n    def get_prefill_chunk_plan(self): ...",
            "DeepseekSparseSWAMetadata isn't the dataclass it was",
        ),
        (
            engine("compress_ratio, prefill_chunk_size").replace("prefill_window_size", "swa"),
            "DeepseekSparseSWAMetadata has no field prefill_window_size",
        ),
        (
            engine("compress_ratio, prefill_chunk_size, layout"),
            "get_prefill_chunk_plan(compress_ratio, prefill_chunk_size, layout) isn't as known: "
            "looked for compress_ratio, prefill_chunk_size; can't fill layout",
        ),
        (
            engine("ratio=1, chunk=4"),
            "get_prefill_chunk_plan(ratio, chunk) isn't as known: looked for compress_ratio",
        ),
    ],
)
def test_a_planner_that_moved_or_changed_is_refused_by_name(install, source, reason):
    install(MODULE if source else "vllm.other", source or "", VERSION)
    got = vllm_adapter.unsupported_reason()
    assert got is not None and reason in got
    with pytest.raises(NotImplementedError):
        plan()


def test_unknown_rows_are_refused(install):
    source = engine("compress_ratio, prefill_chunk_size").replace(
        "(i, i + 1, compress_ratio, w + 0)", "(i, i + 1)"
    )
    install(MODULE, source, VERSION)
    with pytest.raises(NotImplementedError, match=r"gave a chunk \(0, 1\); known are rows"):
        plan()
