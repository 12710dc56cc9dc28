"""Recipes of models that are made for videos, and take images as well: LLaVA-NeXT-Video and VideoLLaMA 3."""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_recipes import (
    TEXT_CONFIG,
    VISION_CONFIG,
    Recipe,
    chatml_tokenizer,
    llama_tokenizer,
    square_size,
    text_ids,
)


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


def video_llama_3() -> Recipe:
    from transformers import (
        Qwen2Config,
        VideoLlama3Config,
        VideoLlama3ForConditionalGeneration,
        VideoLlama3ImageProcessorPil,
    )
    from transformers.models.video_llama_3.configuration_video_llama_3 import VideoLlama3VisionConfig

    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = chatml_tokenizer("<|image_pad|>\n", tokens, video="<|video_pad|>\n")
    vision: dict[str, Any] = {**VISION_CONFIG, "patch_size": 14}
    config = VideoLlama3Config(
        vision_config=VideoLlama3VisionConfig(**vision),
        text_config=Qwen2Config(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    token = 28**2  # pixels of a visual token of a video
    images = VideoLlama3ImageProcessorPil(size={"shortest_edge": 4 * token, "longest_edge": 16 * token})
    videos = {
        "video_processor_type": "VideoLlama3VideoProcessor",
        "size": {"shortest_edge": 4 * token, "longest_edge": 12 * 9 * token},
        "patch_size": 14,
        "merge_size": 2,
        "use_token_compression": True,
    }
    fields = {"processor_class": "VideoLlama3Processor"}
    return Recipe(config, VideoLlama3ForConditionalGeneration, tokenizer, images, fields, videos=videos)
