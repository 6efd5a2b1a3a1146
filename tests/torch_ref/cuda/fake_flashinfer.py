"""A flashinfer.mla that checks what the real one documents and computes on the CPU."""

FA = """
import math
from dataclasses import dataclass
import torch
from tests.torch_ref.cuda.fake_attention import attend
plans = []

@dataclass
class MLAPlanMetadata:
    qo_indptr: object
    kv_indptr: object
    kv_indices: object
    kv_len_arr: object
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8
        self.backend = backend

    def plan(self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
             q_data_type, kv_data_type, query_layout="packed", kv_cache_layout="packed",
             lse_mode="none", scale_mode="default"):
        for tensor in vars(metadata).values():
            assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.ndim == 1
        assert (head_dim_ckv, head_dim_kpe) == (512, 64) and lse_mode != "none"
        self.queries = metadata.qo_indptr.diff().tolist()
        self.lengths = metadata.kv_len_arr.tolist()
        pages = metadata.kv_indptr.diff().tolist()
        if not self.queries or len(self.queries) != len(self.lengths) != len(pages):
            raise ValueError("CSR metadata batch dimensions must agree")
        if pages != [-(-n // page_size) for n in self.lengths]:
            raise ValueError("CSR metadata page counts in kv_indptr must equal ceil")
        assert metadata.kv_indices.numel() >= max(1, sum(pages))
        self.pages = metadata.kv_indices[: sum(pages)].split(pages)
        self.planned = dict(causal=causal, sm_scale=sm_scale, lse_mode=lse_mode, heads=num_heads,
                            scale_mode=scale_mode, page_size=page_size, kv=kv_data_type)
        plans.append(self.planned | dict(queries=self.queries, lengths=self.lengths,
                                         backend=self.backend))

    def run(self, *, query, kv_cache, return_lse, return_lse_base_on_e, ckv_scale=None,
            kpe_scale=None):
        p = self.planned
        assert return_lse and p["lse_mode"] == ("basee" if return_lse_base_on_e else "base2")
        assert kv_cache.dtype == p["kv"] and kv_cache.shape[1] == p["page_size"]
        assert (ckv_scale is not None) == (p["scale_mode"] == "kv-per-tensor")
        assert query.shape == (sum(self.queries), p["heads"], 576)
        outs, lses = [], []
        for one, pages, n in zip(query.split(self.queries), self.pages, self.lengths):
            keys = kv_cache[pages.long()].reshape(-1, 576)[:n].float()
            keys *= ckv_scale or 1.0
            out, lse = attend(one, keys, p["sm_scale"], p["causal"])
            outs.append(out.bfloat16())
            lses.append(lse if return_lse_base_on_e else lse / math.log(2))
        return torch.cat(outs), torch.cat(lses)
"""

DCP = """
import math
import torch
calls = []

def trtllm_batch_decode_with_kv_cache_mla(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim,
        block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, backend="auto",
        return_lse=False, cum_seq_lens_q=None, max_q_len=None, enable_dcp=False, cp_world=1,
        cp_rank=0, causal_seqlens_kv_global=None, return_lse_base=None):
    calls.append(dict(query=query, block_tables=block_tables, seq_lens=seq_lens,
                      max_seq_len=max_seq_len, bounds=causal_seqlens_kv_global,
                      starts=cum_seq_lens_q, max_q_len=max_q_len))
    assert backend == "cute-dsl" and return_lse and return_lse_base is None and enable_dcp
    assert query.dtype == kv_cache.dtype and not workspace_buffer.any()
    P, H = kv_cache.shape[1], query.shape[-2]
    if cum_seq_lens_q is None:
        assert query.ndim == 4
        queries = [query.shape[1]] * len(query)
    else:
        assert query.ndim == 3
        queries = cum_seq_lens_q.diff().tolist()
        assert max_q_len >= max(queries)
    batch = len(queries)
    if tuple(causal_seqlens_kv_global.shape) != (batch,):
        raise ValueError(f"causal_seqlens_kv_global must have shape ({batch},)")
    assert block_tables.shape[0] == batch and block_tables.shape[1] % (128 // P) == 0
    assert (block_tables >= 0).all() and max_seq_len >= max(seq_lens.tolist())
    out = torch.zeros(sum(queries), H, 512)
    lse = torch.full((sum(queries), H), -math.inf)
    t, q = 0, query.reshape(-1, H, 576).float()
    for b, (count, n) in enumerate(zip(queries, seq_lens.tolist())):
        keys = kv_cache[block_tables[b, : -(-n // P)].long()].reshape(-1, 576)[:n].float()
        position = torch.arange(n) * cp_world + cp_rank
        for j in range(count):
            seen = keys[position < causal_seqlens_kv_global[b] - (count - 1 - j)]
            if len(seen):
                z = q[t] @ seen.T * bmm1_scale
                lse[t] = torch.logsumexp(z, -1)
                out[t] = torch.softmax(z, -1) @ seen[:, :512] * bmm2_scale
            t += 1
    return out.bfloat16().reshape(*query.shape[:-1], 512), lse
"""
PACKAGE = '__version__ = "0.7.4"\n'
