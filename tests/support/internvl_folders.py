"""Folders in the format that OpenGVLab publishes InternVL 2 to 3.5 in, tiny and with seeded weights.

Names, shapes and settings are those of the original code (github.com/OpenGVLab/InternVL, commit
2410d1dbf208f0e799459aff9376e5747dbf41a2, MIT), which loads such a folder as it is. Nothing here knows how the product
converts one. Weights are whole numbers of a seeded generator, scaled: the same bits on any processor.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.internvl_tokenizers import BYTE_LEVEL, MEDIA_TOKENS, write_byte_level, write_sentencepiece

SIDE, PATCH, WIDTH, VISION_WIDTH, LAYERS = 56, 14, 64, 48, 2
SYSTEM = "You are tiny. 你好, 'quoted' \"twice\" \\ once."
CONVERSATION = f"""# templates of a checkpoint, as its own code registers them
register_conv_template(
    Conversation(
        name='other',
        system_template='{{system_message}}',
        roles=('A', 'B'),
        sep_style=SeparatorStyle.ADD_COLON_TWO,
    )
)
register_conv_template(
    Conversation(
        name='tiny-chat',
        system_template='<|im_start|>system\\n{{system_message}}',
        # system_message='an older one',
        system_message={SYSTEM!r},
        roles=('<|im_start|>user\\n', '<|im_start|>assistant\\n'),
        sep_style=SeparatorStyle.MPT,
        sep='<|im_end|>',
        stop_str='<|endoftext|>',
    )
)
register_conv_template(
    Conversation(
        name='tiny-lines',
        system_template='<|im_start|>system\\n{{system_message}}',
        system_message='Short' ' lines.',
        roles=('<|im_start|>user\\n', '<|im_start|>assistant\\n'),
        sep_style=SeparatorStyle.MPT,
        sep='<|im_end|>\\n',
    )
)
"""
_TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "attn_implementation": "flash_attention_2",
    "_name_or_path": "somewhere/else",
    # What older libraries write of every config, and OpenGVLab's of some.
    "bad_words_ids": None,
    "do_sample": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "length_penalty": 1.0,
    "max_length": 20,
    "moe_config": None,
    "num_beams": 1,
    "output_attentions": False,
    "pruned_heads": {},
    "return_dict": True,
    "sep_token_id": None,
    "temperature": 1.0,
    "tokenizer_class": None,
    "top_k": 50,
    "torchscript": False,
    "use_bfloat16": True,
}
_VISION: dict[str, Any] = {
    "architectures": ["InternVisionModel"],
    "model_type": "intern_vit_6b",
    "hidden_size": VISION_WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": SIDE,
    "patch_size": PATCH,
    "layer_norm_eps": 1e-06,
    "norm_type": "layer_norm",
    "hidden_act": "gelu",
    "qk_normalization": False,
    "qkv_bias": True,
    "drop_path_rate": 0.1,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "initializer_factor": 1.0,
    "use_flash_attn": True,
    "moe_coeff_ratio": 0.5,
    "num_experts": 8,
    "use_moe": False,
}
_CLASSES = {
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class Published:
    """One published checkpoint.

    - ``text``: type of the text model.
    - ``vision``, ``llm``, ``fields``: fields of the configs that differ.
    - ``files``: shards of the weights; several have an index.
    """

    text: str = "internlm2"
    vision: Mapping[str, Any] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    files: int = 1


# As InternVL2-8B: InternViT-300M and InternLM2, whose rotary positions are scaled beyond the context alone.
SMALL_TOWER = Published(llm={"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1000000})
# As InternVL2-26B: InternViT-6B with normalised queries and keys, in several files.
LARGE_TOWER = Published(
    vision={"qk_normalization": True, "qkv_bias": False, "norm_type": "rms_norm"},
    fields={"template": "tiny-lines", "max_dynamic_patch": 6},
    files=3,
)
# As InternVL2-1B and InternVL2.5: Qwen 2, and features of a layer before the last.
QWEN = Published(
    "qwen2",
    llm={"rms_norm_eps": 1e-6, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}},
    fields={"template": "tiny-lines", "select_layer": -2},
)
# As InternVL2-Llama3-76B.
LLAMA = Published("llama", llm={"rope_theta": 500000.0})
# InternLM2 has biases in its attention where its config says so.
BIASED = Published(llm={"bias": True})
# As InternVL3.5, whose code is that of internvl_chat_gpt_oss beside the others' in the same repository.
QWEN3 = Published("qwen3", llm={"head_dim": 32, "attention_bias": False}, fields={"template": "tiny-lines"})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MIXTURE = Published(
    "qwen3_moe",
    llm={**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16, "attention_bias": False},
    fields={"template": "tiny-lines"},
)
PUBLISHED = {
    "small": SMALL_TOWER,
    "large": LARGE_TOWER,
    "qwen": QWEN,
    "llama": LLAMA,
    "biased": BIASED,
    "qwen3": QWEN3,
    "mixture": MIXTURE,
}


def write_published(folder: Path, made: Published) -> Path:
    """Write such a checkpoint into ``folder``, which is made; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = write_byte_level(folder, made.text) if made.text in BYTE_LEVEL else write_sentencepiece(folder)
    config = make_config(made, tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "conversation.py").write_text(CONVERSATION)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    weights = {name: make_tensor(name, shape) for name, shape in list_shapes(config)}
    head = weights["language_model." + ("output" if made.text == "internlm2" else "lm_head") + ".weight"]
    head[tokens.first_special :] = 0  # of special tokens: an output ends by its length
    head[:3] = 0
    _write_weights(folder, weights, made.files)
    return folder


def make_config(made: Published, tokens: Any) -> dict[str, Any]:
    """Make the fields of a config.json as the original code writes them."""
    own = {"bias": False, "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}}
    llm = {
        **_TEXT,
        **(own if made.text == "internlm2" else {}),
        "architectures": [_CLASSES[made.text]],
        "model_type": made.text,
        "vocab_size": tokens.count,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.eos,
        **made.llm,
    }
    return {
        "architectures": ["InternVLChatModel"],
        "hidden_size": WIDTH,
        "image_fold": None,
        "transformers_version": None,
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        },
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": SIDE,
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "tiny-chat",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {**_VISION, **made.vision},
        "llm_config": llm,
        **made.fields,
    }


def list_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List the weights of a checkpoint by the original's names."""
    yield from _list_vision(config["vision_config"])
    width, vision = config["llm_config"]["hidden_size"], config["vision_config"]["hidden_size"]
    yield from (("mlp1.0.weight", (4 * vision,)), ("mlp1.0.bias", (4 * vision,)))
    yield from (("mlp1.1.weight", (width, 4 * vision)), ("mlp1.1.bias", (width,)))
    yield from (("mlp1.3.weight", (width, width)), ("mlp1.3.bias", (width,)))
    yield from (_list_internlm2 if config["llm_config"]["model_type"] == "internlm2" else _list_llama)(
        config["llm_config"]
    )


def _list_vision(vision: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    root = "vision_model.embeddings."
    yield f"{root}class_embedding", (1, 1, width)
    yield f"{root}position_embedding", (1, (vision["image_size"] // patch) ** 2 + 1, width)
    yield f"{root}patch_embedding.weight", (width, 3, patch, patch)
    yield f"{root}patch_embedding.bias", (width,)
    for layer in range(vision["num_hidden_layers"]):
        root = f"vision_model.encoder.layers.{layer}."
        yield from ((f"{root}ls1", (width,)), (f"{root}ls2", (width,)))
        yield f"{root}attn.qkv.weight", (3 * width, width)
        if vision["qkv_bias"]:
            yield f"{root}attn.qkv.bias", (3 * width,)
        if vision["qk_normalization"]:
            yield from ((f"{root}attn.q_norm.weight", (width,)), (f"{root}attn.k_norm.weight", (width,)))
        for name, shape in (("attn.proj", (width, width)), ("mlp.fc1", (inner, width)), ("mlp.fc2", (width, inner))):
            yield from ((f"{root}{name}.weight", shape), (f"{root}{name}.bias", shape[:1]))
        for name in ("norm1", "norm2"):
            yield f"{root}{name}.weight", (width,)
            if vision["norm_type"] == "layer_norm":
                yield f"{root}{name}.bias", (width,)


def _list_internlm2(llm: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, each = llm["hidden_size"], llm["intermediate_size"], llm["hidden_size"] // llm["num_attention_heads"]
    rows = (llm["num_attention_heads"] + 2 * llm["num_key_value_heads"]) * each
    yield "language_model.model.tok_embeddings.weight", (llm["vocab_size"], width)
    for layer in range(llm["num_hidden_layers"]):
        root = f"language_model.model.layers.{layer}."
        for name, shape in (("wqkv", (rows, width)), ("wo", (width, width))):
            yield f"{root}attention.{name}.weight", shape
            if llm["bias"]:
                yield f"{root}attention.{name}.bias", shape[:1]
        for name, shape in (("w1", (inner, width)), ("w3", (inner, width)), ("w2", (width, inner))):
            yield f"{root}feed_forward.{name}.weight", shape
        yield from ((f"{root}attention_norm.weight", (width,)), (f"{root}ffn_norm.weight", (width,)))
    yield "language_model.model.norm.weight", (width,)
    yield "language_model.output.weight", (llm["vocab_size"], width)


def _list_llama(llm: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, each = llm["hidden_size"], llm.get("head_dim", llm["hidden_size"] // llm["num_attention_heads"])
    rows, keys = llm["num_attention_heads"] * each, llm["num_key_value_heads"] * each
    yield "language_model.model.embed_tokens.weight", (llm["vocab_size"], width)
    for layer in range(llm["num_hidden_layers"]):
        root = f"language_model.model.layers.{layer}."
        for name, count in (("q_proj", rows), ("k_proj", keys), ("v_proj", keys)):
            yield f"{root}self_attn.{name}.weight", (count, width)
            if llm["model_type"] == "qwen2":
                yield f"{root}self_attn.{name}.bias", (count,)
        yield f"{root}self_attn.o_proj.weight", (width, rows)
        if llm["model_type"].startswith("qwen3"):
            yield from ((f"{root}self_attn.{name}_norm.weight", (each,)) for name in "qk")
        yield from _list_gated(f"{root}mlp.", llm)
        yield f"{root}input_layernorm.weight", (width,)
        yield f"{root}post_attention_layernorm.weight", (width,)
    yield "language_model.model.norm.weight", (width,)
    yield "language_model.lm_head.weight", (llm["vocab_size"], width)


def _list_gated(root: str, llm: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, roots, inner = llm["hidden_size"], [root], llm["intermediate_size"]
    if "num_experts" in llm:
        yield f"{root}gate.weight", (llm["num_experts"], width)
        roots, inner = (
            [f"{root}experts.{number}." for number in range(llm["num_experts"])],
            llm["moe_intermediate_size"],
        )
    for each in roots:
        yield from ((f"{each}{name}_proj.weight", (inner, width)) for name in ("gate", "up"))
        yield f"{each}down_proj.weight", (width, inner)


def make_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a weight of its name and shape: around 1 for scales, else about as large as keeps what passes it."""
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randint(-1000, 1001, shape, generator=seed).float() / 1000
    if name.endswith("bias"):
        return drawn * 0.2
    if len(shape) == 1:
        return 1 + drawn * 0.3
    if "embed" in name:
        return drawn * (0.1 if "patch" in name else 0.9)
    return drawn * (2.6 / shape[-1] ** 0.5)


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], files: int) -> None:
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    places: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: weights[name] for name in names[number::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(each.nbytes for each in weights.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


__all__ = ["MEDIA_TOKENS", "PUBLISHED", "Published", "make_config", "write_published"]
