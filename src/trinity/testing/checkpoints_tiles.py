"""Recipes of the models that cut an image into tiles: InternVL, Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_recipes import (
    VISION_CONFIG,
    Recipe,
    chatml_tokenizer,
    make_images,
    make_recipe,
    square_size,
    text_fields,
)
from trinity.testing.checkpoints_text import build_tokenizer, chat_template


def internvl() -> Recipe:
    tokens = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokenizer = chatml_tokenizer("<IMG_CONTEXT>\n", tokens, video="<video>\n")
    fields = {
        "vision_config": {**VISION_CONFIG, "image_size": 56, "patch_size": 14},
        "text_config": text_fields(tokenizer, model_type="qwen2"),
        "image_token_id": tokenizer.context_image_token_id,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }
    images = make_images("GotOcr2", size=square_size(56), crop_to_patches=True, max_patches=4)
    videos = {"video_processor_type": "InternVLVideoProcessor", "size": square_size(56)}
    parts = {"image_processor": images, "videos": videos}
    return make_recipe("InternVL", fields, tokenizer, {"image_seq_length": 4}, **parts)


def idefics3() -> Recipe:
    return _tiled("Idefics3")


def smolvlm() -> Recipe:
    videos = {
        "video_processor_type": "SmolVLMVideoProcessor",
        "size": {"longest_edge": 84},
        "max_image_size": {"longest_edge": 84},
        "fps": 1,
        "num_frames": 16,
    }
    return _tiled("SmolVLM", side=84, scale=3, videos=videos)


def _tiled(family: str, side: int = 56, scale: int = 2, videos: dict[str, Any] | None = None) -> Recipe:
    """Make a recipe with tiles of ``side`` pixels, where ``scale`` x ``scale`` patches become one visual token."""
    tokenizer = build_tokenizer(
        bos="<|im_start|>",
        eos="<end_of_utterance>",
        pad="<|endoftext|>",
        extra={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        plain=tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
        template=chat_template(
            start="<|im_start|>",
            role="{{ message['role'] | capitalize }}: ",
            end="<end_of_utterance>\n",
            image="<image>",
            answer="Assistant:",
        ),
    )
    fields = {
        "vision_config": {**VISION_CONFIG, "image_size": side, "patch_size": 14},
        "text_config": text_fields(tokenizer, model_type="llama"),
        "image_token_id": tokenizer.image_token_id,
        "scale_factor": scale,
        "pad_token_id": tokenizer.pad_token_id,
    }
    images = make_images(family, size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side})
    return make_recipe(family, fields, tokenizer, {"image_seq_len": 4}, image_processor=images, videos=videos)
