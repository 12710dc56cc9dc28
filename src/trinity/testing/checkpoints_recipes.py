"""Recipes of the small checkpoints: config, model class, tokenizer and image processor of each architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.testing.checkpoints_text import USER_ASSISTANT, build_tokenizer, chat_template

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
VISION = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint is made of. ``processor`` are the fields of processor_config.json (None: text only)."""

    config: Any
    model_class: Any
    tokenizer: Any
    image_processor: Any = None
    processor: dict[str, Any] | None = None
    silent_ids: tuple[int, ...] = field(default=())

    def save_processor(self, directory: Path) -> None:
        self.tokenizer.save_pretrained(directory)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(directory)
        if self.processor is not None:
            (directory / "processor_config.json").write_text(json.dumps(self.processor, indent=2) + "\n")


def llama_tokenizer(**extra: str) -> Any:
    """A tokenizer in the manner of Llama 2's: <s> first, roles in capitals."""
    image = extra.get("image_token", "")
    template = chat_template(start="{{ bos_token }}", image=image + "\n" if image else "", **USER_ASSISTANT)
    return build_tokenizer(bos="<s>", eos="</s>", pad="<pad>", extra=extra, template=template)


def text_ids(tokenizer: Any) -> dict[str, int]:
    """Vocabulary size and token ids as a text config wants them."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, **ids}


def _llava(text: dict[str, Any], vision: dict[str, Any]) -> Recipe:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = llama_tokenizer(image_token="<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, patch_size=14, projection_dim=vision["hidden_size"]),
        text_config=LlamaConfig(**text, **text_ids(tokenizer)),
        image_token_index=tokenizer.image_token_id,
        vision_feature_layer=-2,
    )
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    images = _clip_images(vision["image_size"])
    return Recipe(config, LlavaForConditionalGeneration, tokenizer, images, processor)


def _clip_images(size: int) -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def llava() -> Recipe:
    return _llava(TEXT, {**VISION, "image_size": 56})


RECIPES: dict[str, Callable[[], Recipe]] = {"llava": llava}
