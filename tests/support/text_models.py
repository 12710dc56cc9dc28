"""Tiny checkpoints of any text type of transformers, served by one language stage and by ``generate()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.stage_driver import Pool
from trinity.core.messages import Open, Prefill, ResolvedSampling, Sampled, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel, load_model

# All text types of transformers 5.23 that are known or pass their self-check.
_NAMES = """
afmoe apertus arcee biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_neox gpt_oss granite
granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm2 llama mellum minimax_m2 ministral ministral3
mistral mixtral nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open starcoder2 vaultgemma
"""
SERVED = tuple(_NAMES.split())
ORIGINAL, WINDOW, CONTEXT = 24, 20, 512  # tiny thresholds, all far below PROMPT
PROMPT, OUTPUTS = 75, 12
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_FEWER = {  # where a type has such a field at all
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "moe_intermediate_size": 32,
}
_DOTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EVERY_HEAD = {"num_key_value_heads": 4}  # types without grouped heads
_FURTHER: dict[str, dict[str, Any]] = {
    "dots1": {**_DOTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0},
    **dict.fromkeys(("biogpt", "ctrl", "gpt2", "gpt_neox", "opt", "persimmon"), _EVERY_HEAD),
}
_SEEDS = {"gpt_neox": 3, "jais2": 3, "starcoder2": 3}  # others end in one token for ever
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}
_CUT = 9


@dataclass(frozen=True)
class Answer:
    """Greedy ``tokens`` and, one row each, their ``logits``."""

    tokens: list[int]
    logits: torch.Tensor


def make_config(model_type: str, *, tiny: bool = True, **fields: Any) -> Any:
    """A config of few and narrow layers; ``tiny``: with every threshold of its type far below ``PROMPT``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    usual = vars(kind())
    given = {**_SIZES, **{name: size for name, size in _FEWER.items() if usual.get(name)}}
    if tiny and usual.get("sliding_window"):
        given["sliding_window"] = WINDOW
    if not tiny and "max_position_embeddings" in usual:
        given["max_position_embeddings"] = usual["max_position_embeddings"]
    if "sliding_attention" in (usual.get("layer_types") or ()):
        given["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    rope = usual.get("rope_parameters") or {}
    if tiny and "original_max_position_embeddings" in rope:
        given["rope_parameters"] = {**rope, "original_max_position_embeddings": ORIGINAL}
    return kind(**{**given, **_FURTHER.get(model_type, {}), **fields})


def build(directory: Path, model_type: str, *, tiny: bool = True, seed: int | None = None, **fields: Any) -> Path:
    """Write a random checkpoint of ``model_type``, with weights whose tokens vary."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = make_config(model_type, tiny=tiny, **fields)
    with torch.random.fork_rng():
        torch.manual_seed(_SEEDS.get(model_type, 0) if seed is None else seed)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = kind(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return directory


def make_prompt(length: int = PROMPT, vocabulary: int = 128) -> list[int]:
    return [5 + (number * 37 + number * number * 11) % (vocabulary - 5) for number in range(length)]


def generate(directory: Path, prompt: Sequence[int], outputs: int = OUTPUTS) -> Answer:
    """What transformers' own ``generate()`` of the whole model says."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=outputs,
        min_new_tokens=None,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Answer(found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits))


def serve(directory: Path, prompt: Sequence[int], outputs: int = OUTPUTS, *, chunk: int = 41) -> Answer:
    """What one stage of trinity says, prefilled in chunks and decoded through a paged cache."""
    seen: list[torch.Tensor] = []
    model = load_model(directory, "PD", dtype="float32", packed=True)
    blocks = -(-(len(prompt) + outputs) // 16) + 1
    pool = Pool(BlockMemory(model.kv_shape(), blocks), 0)
    stage = LanguageStage(model, pool.memory, None, "PD", lambda name, index, logits: seen.append(logits.clone()), None)
    work = Work(request="a", prompt=tuple(prompt), max_tokens=outputs, sampling=ResolvedSampling())
    stage.open(Open(work=work, blocks=pool.take(blocks - 1), tokens=()))

    def step(*prefills: Prefill, decodes: tuple[str, ...] = ()) -> dict[str, Sampled]:
        return stage.forward(Step(0, "joint", prefills=prefills, decodes=decodes))

    starts = range(0, len(prompt), chunk)
    pieces = [Prefill("a", start, min(chunk, len(prompt) - start), start == starts[-1]) for start in starts]
    tokens = [[step(piece) for piece in pieces][-1]["a"].token]
    tokens += [step(decodes=("a",))["a"].token for _ in range(outputs - 1)]
    return Answer(tokens, torch.stack(seen))


@torch.inference_mode()
def forward_at(directory: Path, prompt: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Logits [starts, length, vocabulary] of transformers' own forward, the prompt's positions from each start."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    places = torch.tensor(starts)[:, None] + torch.arange(len(prompt))
    given = torch.tensor([list(prompt)]).expand(len(starts), -1)
    logits: torch.Tensor = model(input_ids=given, position_ids=places, use_cache=False).logits
    return logits


@torch.inference_mode()
def paged_at(directory: Path, prompt: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Logits [starts, 3, vocabulary] of trinity after ``_CUT`` tokens, all but one, all: two chunks, a decode."""
    model, ids, last = load_model(directory, "PD", dtype="float32", packed=True), np.array(prompt), len(prompt) - 1
    each = -(-len(prompt) // 16)
    kv = torch.zeros((each * len(starts), *model.kv_shape().shape))
    tables, at = np.arange(len(kv)).reshape(len(starts), each), np.arange(len(prompt))
    found = []
    for low, high in ((0, _CUT), (_CUT, last)):
        given = zip(starts, tables, strict=True)
        chunks = [Chunk(ids[low:high], start + at[low:high], low, table) for start, table in given]
        found.append(_run(model, NO_DECODES, chunks, kv))
    same = np.full(len(starts), last)
    found.append(_run(model, Decodes(ids[same], np.array(starts) + last, same + 1, tables), [], kv))
    return torch.stack(found, 1)


def _run(model: LoadedModel, decodes: Decodes, chunks: Sequence[Chunk], kv: torch.Tensor) -> torch.Tensor:
    batch = build_batch(decodes, chunks, 16, model.adapter.axes, model.device)
    return model.forward(batch, kv, None, TorchAttention())
