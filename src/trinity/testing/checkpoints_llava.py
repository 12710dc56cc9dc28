"""Recipes of the LLaVA line, videos included, and of Gemma 3: a ViT, a projector and a language model."""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_recipes import (
    MIDSIZE_VOCABULARY,
    TEXT_CONFIG,
    VISION_CONFIG,
    Recipe,
    chatml_tokenizer,
    llama_tokenizer,
    make_images,
    make_recipe,
    square_size,
    text_fields,
)
from trinity.testing.checkpoints_text import build_tokenizer, chat_template

_PROCESSOR = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def llava() -> Recipe:
    return _llava(TEXT_CONFIG, {**VISION_CONFIG, "image_size": 56})


def wide_llava() -> Recipe:
    """LLaVA whose every width is a multiple of 32, as kernels over blocks of weights ask for."""
    return _llava(TEXT_CONFIG, {**VISION_CONFIG, "hidden_size": 64, "intermediate_size": 128, "image_size": 56})


def llava_110m() -> Recipe:
    return _midsize(vision=(384, 12), text=(768, 12), intermediate=2048)


def llava_500m() -> Recipe:
    return _midsize(vision=(768, 12), text=(1280, 22), intermediate=3456)


def llava_7b() -> Recipe:
    """The shape of LLaVA-1.5-7B: 14 GB in 16 bit, so benchmarks make up weights on the GPU."""
    text = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    text |= {"num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096, "head_dim": 128}
    tower = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return _llava({**TEXT_CONFIG, **text}, {**tower, "image_size": 336})


def _midsize(vision: tuple[int, int], text: tuple[int, int], intermediate: int) -> Recipe:
    """A ViT at 336 px and a language model of (width, layers), heads of 64, four of which share a KV head."""
    heads = text[0] // 64
    language = {
        "hidden_size": text[0],
        "intermediate_size": intermediate,
        "num_hidden_layers": text[1],
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "vocab_size": MIDSIZE_VOCABULARY,
        "max_position_embeddings": 4096,
    }
    width, layers = vision
    tower = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return _llava({**TEXT_CONFIG, **language}, {**tower, "num_attention_heads": width // 64, "image_size": 336})


def _llava(text: dict[str, Any], vision: dict[str, Any]) -> Recipe:
    tokenizer, size = llama_tokenizer(image_token="<image>"), vision["image_size"]
    images = make_images("CLIP", size={"shortest_edge": size}, crop_size=square_size(size))
    # Over twelve layers the branches would drown embeddings of 0.5, and a text would settle on a few tokens.
    deep = 2.0 if text["num_hidden_layers"] > 2 else 0.5
    fields = _clip_and_llama(text, vision, tokenizer)
    return make_recipe("Llava", fields, tokenizer, _PROCESSOR, image_processor=images, embedding_std=deep)


def llava_next() -> Recipe:
    tokenizer, grid = llama_tokenizer(image_token="<image>"), _grid(42)
    fields = _clip_and_llama(TEXT_CONFIG, {**VISION_CONFIG, "image_size": 42}, tokenizer)
    fields |= {"image_grid_pinpoints": grid, "image_seq_length": 9}
    return make_recipe("LlavaNext", fields, tokenizer, _PROCESSOR, image_processor=_tiled_images(42, grid))


def llava_next_video() -> Recipe:
    tokenizer, grid = llama_tokenizer(image_token="<image>", video_token="<video>"), _grid(56)[:3]
    fields = _clip_and_llama(TEXT_CONFIG, {**VISION_CONFIG, "image_size": 56}, tokenizer)
    fields |= {"image_grid_pinpoints": grid, "image_seq_length": 16, "video_seq_length": 4}
    fields |= {"video_token_index": tokenizer.video_token_id}
    videos = {
        "video_processor_type": "LlavaNextVideoVideoProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": square_size(56),
    }
    parts = {"image_processor": _tiled_images(56, grid), "videos": videos}
    return make_recipe("LlavaNextVideo", fields, tokenizer, _PROCESSOR, **parts)


def _clip_and_llama(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    tower = {"model_type": "clip_vision_model", "patch_size": 14, "projection_dim": vision["hidden_size"]}
    return {
        "vision_config": {**tower, **vision},
        "text_config": text_fields(tokenizer, model_type="llama", **text),
        "image_token_index": tokenizer.image_token_id,
    }


def _tiled_images(size: int, grid: list[list[int]]) -> Any:
    sizes = {"size": {"shortest_edge": size}, "crop_size": square_size(size)}
    return make_images("LlavaNext", **sizes, image_grid_pinpoints=grid)


def _grid(size: int) -> list[list[int]]:
    return [[size, size], [size, 2 * size], [2 * size, size], [2 * size, 2 * size]]


def llava_onevision() -> Recipe:
    tokenizer = chatml_tokenizer("<image>\n", {"image_token": "<image>", "video_token": "<video>"}, video="<video>\n")
    ratio = "anyres_max_2"  # at most two tiles' worth of features: larger grids take the path that interpolates
    fields = {
        "vision_config": _siglip(42),
        "text_config": text_fields(tokenizer, model_type="qwen2"),
        "image_token_index": tokenizer.image_token_id,
        "video_token_index": tokenizer.video_token_id,
        "image_grid_pinpoints": _grid(42),
        "vision_aspect_ratio": ratio,
    }
    processor = {"num_image_tokens": 9, "vision_feature_select_strategy": "full", "vision_aspect_ratio": ratio}
    return make_recipe(
        *("LlavaOnevision", fields, tokenizer, processor),
        image_processor=make_images("LlavaOnevision", size=square_size(42), image_grid_pinpoints=_grid(42)),
        videos={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": square_size(42)},
    )


def _siglip(size: int) -> dict[str, Any]:
    tower = {"model_type": "siglip_vision_model", "image_size": size, "patch_size": 14, "vision_use_head": False}
    return {**VISION_CONFIG, **tower}


def gemma3() -> Recipe:
    tokenizer = build_tokenizer(
        bos="<bos>",
        eos="<end_of_turn>",
        pad="<pad>",
        extra={
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
        plain=("<start_of_turn>",),
        template=chat_template(
            start="{{ bos_token }}",
            role="<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}\n",
            end="<end_of_turn>\n",
            image="<start_of_image>",
            answer="<start_of_turn>model\n",
        ),
    )
    text: dict[str, Any] = {
        "tie_word_embeddings": True,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
    }
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    fields = {
        "vision_config": _siglip(84),
        "text_config": text_fields(tokenizer, model_type="gemma3_text", **text),
        "mm_tokens_per_image": 9,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
    }
    # Embeddings are multiplied by sqrt(width) and tied to the head: at 0.5 every text would repeat one token, and
    # without stronger attention and MLP branches it would settle on one.
    raised = {
        "q_norm.weight": 1.0,
        "k_norm.weight": 1.0,
        "post_attention_layernorm.weight": 2.0,
        "post_feedforward_layernorm.weight": 4.0,
    }
    parts = {"image_processor": make_images("Gemma3", size=square_size(84)), "embedding_std": 0.12, "raised": raised}
    return make_recipe("Gemma3", fields, tokenizer, {"image_seq_length": 9}, **parts)
