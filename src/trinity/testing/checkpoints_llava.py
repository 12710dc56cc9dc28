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
    square_size,
    text_ids,
)
from trinity.testing.checkpoints_text import build_tokenizer, chat_template


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
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration

    tokenizer, size = llama_tokenizer(image_token="<image>"), vision["image_size"]
    config = LlavaConfig(**_clip_and_llama(text, vision, tokenizer))
    images = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=square_size(size))
    # Over twelve layers the branches would drown embeddings of 0.5, and a text would settle on a few tokens.
    deep = 2.0 if text["num_hidden_layers"] > 2 else 0.5
    fields = _fields("LlavaProcessor")
    return Recipe(config, LlavaForConditionalGeneration, tokenizer, images, fields, embedding_std=deep)


def llava_next() -> Recipe:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextImageProcessorPil

    tokenizer, grid = llama_tokenizer(image_token="<image>"), _grid(42)
    parts = _clip_and_llama(TEXT_CONFIG, {**VISION_CONFIG, "image_size": 42}, tokenizer)
    config = LlavaNextConfig(**parts, image_grid_pinpoints=grid, image_seq_length=9)
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 42}, crop_size=square_size(42), image_grid_pinpoints=grid
    )
    return Recipe(config, LlavaNextForConditionalGeneration, tokenizer, images, _fields("LlavaNextProcessor"))


def llava_next_video() -> Recipe:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextImageProcessorPil,
        LlavaNextVideoConfig,
        LlavaNextVideoForConditionalGeneration,
    )

    tokenizer = llama_tokenizer(image_token="<image>", video_token="<video>")
    grid = [[56, 56], [56, 112], [112, 56]]
    vision = {**VISION_CONFIG, "image_size": 56, "patch_size": 14, "projection_dim": VISION_CONFIG["hidden_size"]}
    config = LlavaNextVideoConfig(
        vision_config=CLIPVisionConfig(**vision),
        text_config=LlamaConfig(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        image_grid_pinpoints=grid,
        image_seq_length=16,
        video_seq_length=4,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 56}, crop_size=square_size(56), image_grid_pinpoints=grid
    )
    fields = {
        "processor_class": "LlavaNextVideoProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    videos = {
        "video_processor_type": "LlavaNextVideoVideoProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": square_size(56),
    }
    return Recipe(config, LlavaNextVideoForConditionalGeneration, tokenizer, images, fields, videos=videos)


def _clip_and_llama(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig

    return {
        "vision_config": CLIPVisionConfig(**vision, patch_size=14, projection_dim=vision["hidden_size"]),
        "text_config": LlamaConfig(**{**text_ids(tokenizer), **text}),
        "image_token_index": tokenizer.image_token_id,
    }


def _fields(name: str) -> dict[str, Any]:
    return {
        "processor_class": name,
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }


def _grid(size: int) -> list[list[int]]:
    return [[size, size], [size, 2 * size], [2 * size, size], [2 * size, 2 * size]]


def llava_onevision() -> Recipe:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        LlavaOnevisionImageProcessorPil,
        Qwen2Config,
        SiglipVisionConfig,
    )

    tokenizer = chatml_tokenizer("<image>\n", {"image_token": "<image>", "video_token": "<video>"}, video="<video>\n")
    ratio = "anyres_max_2"  # at most two tiles' worth of features: larger grids take the path that interpolates
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION_CONFIG, image_size=42, patch_size=14, vision_use_head=False),
        text_config=Qwen2Config(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
        image_grid_pinpoints=_grid(42),
        vision_aspect_ratio=ratio,
    )
    images = LlavaOnevisionImageProcessorPil(size=square_size(42), image_grid_pinpoints=_grid(42))
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 9,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": ratio,
    }
    videos = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": square_size(42)}
    return Recipe(config, LlavaOnevisionForConditionalGeneration, tokenizer, images, processor, videos=videos)


def gemma3() -> Recipe:
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessorPil,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    tokenizer = _gemma_tokenizer()
    text = {
        **TEXT_CONFIG,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
    }
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**VISION_CONFIG, image_size=84, patch_size=14, vision_use_head=False),
        text_config=Gemma3TextConfig(
            **text, **text_ids(tokenizer), layer_types=["sliding_attention", "full_attention"]
        ),
        mm_tokens_per_image=9,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    images = Gemma3ImageProcessorPil(size=square_size(84))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 9}
    # Embeddings are multiplied by sqrt(width) and tied to the head: at 0.5 every text would repeat one token, and
    # without stronger attention and MLP branches it would settle on one.
    raised = {
        "q_norm.weight": 1.0,
        "k_norm.weight": 1.0,
        "post_attention_layernorm.weight": 2.0,
        "post_feedforward_layernorm.weight": 4.0,
    }
    return Recipe(
        config,
        Gemma3ForConditionalGeneration,
        tokenizer,
        images,
        processor,
        embedding_std=0.12,
        raised=raised,
    )


def _gemma_tokenizer() -> Any:
    return build_tokenizer(
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
