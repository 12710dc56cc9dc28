"""Recipes of the models that cut an image into tiles: InternVL, Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Any

from trinity.preprocess.checkpoint.video_processors import find_images
from trinity.testing.checkpoints_recipes import (
    TEXT_CONFIG,
    VISION_CONFIG,
    Recipe,
    chatml_tokenizer,
    square_size,
    text_ids,
)
from trinity.testing.checkpoints_text import build_tokenizer, chat_template


def internvl() -> Recipe:
    from transformers import GotOcr2ImageProcessorPil, InternVLConfig, InternVLForConditionalGeneration, Qwen2Config
    from transformers.models.internvl.configuration_internvl import InternVLVisionConfig

    tokens = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokenizer = chatml_tokenizer("<IMG_CONTEXT>\n", tokens, video="<video>\n")
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**VISION_CONFIG, image_size=56, patch_size=14),
        text_config=Qwen2Config(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(size=square_size(56), crop_to_patches=True, max_patches=4)
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    videos = {"video_processor_type": "InternVLVideoProcessor", "size": square_size(56)}
    return Recipe(config, InternVLForConditionalGeneration, tokenizer, images, processor, videos=videos)


def idefics3() -> Recipe:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    parts = _tile_parts(Idefics3Config, Idefics3VisionConfig, find_images("Idefics3ImageProcessorPil", "pil"))
    return Recipe(
        model_class=Idefics3ForConditionalGeneration,
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
        **parts,
    )


def smolvlm() -> Recipe:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

    images = find_images("SmolVLMImageProcessorPil", "pil")
    parts = _tile_parts(SmolVLMConfig, SmolVLMVisionConfig, images, side=84, scale=3)
    return Recipe(
        model_class=SmolVLMForConditionalGeneration,
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        videos={
            "video_processor_type": "SmolVLMVideoProcessor",
            "size": {"longest_edge": 84},
            "max_image_size": {"longest_edge": 84},
            "fps": 1,
            "num_frames": 16,
        },
        **parts,
    )


def _tile_parts(
    config_class: Any, vision_class: Any, images_class: Any, side: int = 56, scale: int = 2
) -> dict[str, Any]:
    """Parts of a recipe with tiles of ``side`` pixels, where ``scale`` x ``scale`` patches become one visual token."""
    from transformers import LlamaConfig

    tokenizer = _tile_tokenizer()
    config = config_class(
        vision_config=vision_class(**VISION_CONFIG, image_size=side, patch_size=14),
        text_config=LlamaConfig(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        scale_factor=scale,
        pad_token_id=tokenizer.pad_token_id,
    )
    images = images_class(size={"longest_edge": 2 * side}, max_image_size={"longest_edge": side})
    return {"config": config, "tokenizer": tokenizer, "image_processor": images}


def _tile_tokenizer() -> Any:
    return build_tokenizer(
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
