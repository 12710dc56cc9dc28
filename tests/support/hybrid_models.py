"""Tiny hybrids: checkpoints of types whose layers keep states, with a tokenizer, and requests for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.text_models import build
from trinity.memory.block_memory import BlockMemory
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.checkpoints_recipes import llama_tokenizer
from trinity.testing.oracle import Oracle

_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_CONVS = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_GRANITE = ["mamba", "mamba", "attention", "mamba"]
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_SHARED},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SHARED},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "num_experts": 1,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [2], "mamba_n_groups": 1},
    "falcon_h1": {**_MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "granitemoehybrid": {
        **_MAMBA,
        "layers_block_type": _GRANITE,
        "layer_types": _GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "lfm2": _CONVS,
    "lfm2_moe": {**_CONVS, **_EXPERTS, "num_dense_layers": 2},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 0.05,  # below which several rows' time steps are raised, and not a single row's
    },
    "olmo_hybrid": {"num_hidden_layers": 4},
}
SERVED = tuple(HYBRIDS)
HELD = "nemotron_h"  # rows of its prompts never run alone
STEPWISE = ("jamba",)  # their own code does not go on with several tokens at once
TEXTS = ("How many people are there?", "The sky above the small red boat is grey.", "A dog", "user: 17 and 42? " * 9)


def build_hybrid(directory: Path, model_type: str, **fields: Any) -> Path:
    """Write a tiny checkpoint of a hybrid with a tokenizer."""
    tokenizer = llama_tokenizer()
    build(directory, model_type, vocab_size=len(tokenizer), **{**HYBRIDS[model_type], **fields})
    tokenizer.save_pretrained(directory)
    return directory


def hybrid_requests(outputs: int = 16, texts: Sequence[str] = TEXTS) -> list[Request]:
    greedy = Sampling(ignore_eos=True)
    return [Request(text, max_tokens=outputs + number, sampling=greedy) for number, text in enumerate(texts)]


@cache
def generated(directory: Path, outputs: int = 16) -> list[tuple[int, ...]]:
    """What ``generate()`` of transformers says to each request."""
    return [tuple(tokens) for tokens in Oracle(directory).generate_all(hybrid_requests(outputs))]


def zero_states(pipe: Pipeline) -> None:
    """Have each state that migrates arrive as zeros."""
    connector, own = pipe.connector, pipe.connector.pull

    async def pull(instance: str, asked: Any) -> Any:
        answer = await own(instance, asked)
        if asked.kind == "state":
            memory: BlockMemory = connector._memories[instance, "state"]
            memory.tensor[list(asked.target_blocks)] = 0
        return answer

    connector.pull = pull  # type: ignore[assignment,method-assign]
