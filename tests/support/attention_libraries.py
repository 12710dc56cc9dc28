"""Stand-ins for attention libraries on a CPU: their parameters by name and order, and what they promise of paged keys.

Names are facts of the releases: flash-attn 3 of 2.8.3 (hopper/flash_attn_interface.py), FlashInfer 0.2.5 (prefill.py,
decode.py), whose parameters later releases up to 0.7.2 still have in this order.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trinity.stages.attention.interface import AttentionParams, build_mask

CALLED: list[tuple[str, dict[str, Any]]] = []  # what was called, with the arguments that were given, by name


def paged(
    query: Tensor, pages: tuple[Tensor, Tensor], begins: Tensor, lengths: Tensor, tables: Tensor, **how: Any
) -> Tensor:
    """What the libraries promise of paged keys, one sequence at a time; causal, aligned to the end."""
    assert query.stride(-1) == 1
    assert all(part.stride(-1) == 1 for part in pages)
    assert all(part.dtype == torch.int32 for part in (begins, lengths, tables))
    out = torch.zeros_like(query)
    for i, length in enumerate(lengths.tolist()):
        low, high = begins[i].item(), begins[i + 1].item()
        keys, values = (part[tables[i].long()].flatten(0, 1)[:length] for part in pages)
        keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[low:high], keys) * how["scale"]
        if how.get("softcap"):
            scores = torch.tanh(scores / how["softcap"]) * how["softcap"]
        window = None if how["window"][0] < 0 else how["window"][0] + 1
        seen = build_mask(
            torch.arange(length - (high - low), length), torch.arange(length), AttentionParams(0, 1.0, window)
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[low:high] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _note(name: str, given: dict[str, Any]) -> None:
    CALLED.append((name, {each: value for each, value in given.items() if each not in ("self", "q")}))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash-attn 3's: rows of a sequence are its last positions, of ``cache_seqlens``."""
    _note("flash3", dict(locals()))
    assert causal
    assert q.dim() == 3, "with cu_seqlens_q rows lie one behind the other"
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert page_table.stride(-1) == 1
    return paged(
        q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table,
        scale=softmax_scale, window=window_size, softcap=softcap,
    )  # fmt: skip


class _Wrapper:
    """What FlashInfer's wrappers share: a plan, and a run for each layer of it."""

    name = ""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert not float_workspace_buffer.any(), "zeros for the first use"
        assert kv_layout == "HND"
        self.planned: dict[str, Any] = {}

    def _plan(self, begins: Tensor, starts: Tensor, pages: Tensor, last: Tensor, how: dict[str, Any]) -> None:
        _note(self.name, how)
        assert all(part.dtype == torch.int32 for part in (begins, starts, pages, last))
        assert not begins.is_cuda, "numbers that are planned with must not be fetched from the device"
        assert len(pages) == int(starts[-1])
        self.planned = {"begins": begins, "starts": starts, "pages": pages, "last": last, **how}

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, **named: Any) -> Tensor:
        assert not args
        assert not named
        plan, (keys, values) = self.planned, paged_kv_cache
        assert keys.stride() == values.stride(), "K and V must have the same strides"
        assert tuple(keys.shape[1:]) == (plan["num_kv_heads"], plan["page_size"], plan["head_dim"])
        assert (q.dtype, keys.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert (q.shape[1], len(q)) == (plan["num_qo_heads"], int(plan["begins"][-1]))
        _note(f"{self.name} run", {"keys": keys, "values": values})
        counts = plan["starts"].diff()
        tables = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for i, count in enumerate(counts.tolist()):
            tables[i, :count] = plan["pages"][int(plan["starts"][i]) :][:count]
        lengths = (counts - 1) * plan["page_size"] + plan["last"]
        return paged(
            q, (keys.transpose(1, 2), values.transpose(1, 2)), plan["begins"], lengths.int(), tables,
            scale=plan["sm_scale"], window=(plan["window_left"], 0), softcap=plan["logits_soft_cap"],
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    name = "prefill"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:
        given = {**locals(), "head_dim": head_dim_qk}
        assert causal
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, given)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    name = "decode"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        non_blocking: bool = True,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 6, 8), "no other groups are compiled"
        given = dict(locals())
        self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, given)


def make_modules() -> dict[str, ModuleType]:
    """Both libraries as modules by name."""
    flash, infer = ModuleType("flash_attn_interface"), ModuleType("flashinfer")
    vars(flash)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    for each in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        vars(infer)[each.__name__] = each
    return {"flash_attn_interface": flash, "flashinfer": infer}


def list_parameters(function: Any) -> list[str]:
    """Parameters of a stand-in by name, in order."""
    return list(inspect.signature(function).parameters)
