"""Recipes of small checkpoints, and the parts that several architectures share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.preprocess.checkpoint.video_processors import find_images
from trinity.testing.checkpoints_text import CHATML, USER_ASSISTANT, build_tokenizer, chat_template

TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MIDSIZE_VOCABULARY = 8192  # more rows than the tokenizer has ids, as published checkpoints have too
VISION_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@dataclass(frozen=True)
class Recipe:
    """Parts of a checkpoint. ``processor`` has the fields of processor_config.json (None: text only).

    ``videos`` has those of video_preprocessor_config.json (None: it has no such file).
    ``tokenizer_format``: "mistral" writes tekken.json alone; None is transformers' own.
    ``raised`` has values to add to norm weights by the end of their names, such as {"q_norm.weight": 1.0}.
    """

    config: Any
    model_class: Any
    tokenizer: Any
    image_processor: Any = None
    processor: dict[str, Any] | None = None
    embedding_std: float = 0.5
    raised: dict[str, float] = field(default_factory=dict)
    videos: dict[str, Any] | None = None
    feature_extractor: Any = None
    tokenizer_format: str | None = None

    def save_processor(self, directory: Path) -> None:
        form = {} if self.tokenizer_format is None else {"save_format": self.tokenizer_format}
        self.tokenizer.save_pretrained(directory, **form)
        if self.image_processor is not None:
            self.image_processor.save_pretrained(directory)
        if self.feature_extractor is not None:
            self.feature_extractor.save_pretrained(directory)
        for name, fields in (("processor", self.processor), ("video_preprocessor", self.videos)):
            if fields is not None:
                (directory / f"{name}_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def llama_tokenizer(**extra: str) -> Any:
    """Build a tokenizer like Llama 2's: <s> first, roles in capitals."""
    image, video = (text + "\n" if text else "" for text in (extra.get("image_token"), extra.get("video_token")))
    template = chat_template(start="{{ bos_token }}", image=image, video=video, **USER_ASSISTANT)
    return build_tokenizer(bos="<s>", eos="</s>", pad="<pad>", extra=extra, template=template)


def text_ids(tokenizer: Any) -> dict[str, Any]:
    """Fields of a text config: vocabulary size and token ids."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id, **ids}


def chatml_tokenizer(image: str, extra: dict[str, str], plain: tuple[str, ...] = (), video: str = "") -> Any:
    """Build a tokenizer like Qwen's: no first token, ChatML turns; ``image``, ``video``: the template's parts."""
    return build_tokenizer(
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        extra=extra,
        plain=("<|im_start|>", *plain),
        template=chat_template(image=image, video=video, **CHATML),
    )


def square_size(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


def text_fields(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Fields of the config of a small language model, with ``more`` of its type."""
    return {**text_ids(tokenizer), **TEXT_CONFIG, **more}


def make_images(family: str, **settings: Any) -> Any:
    """Make the image processor, with its PIL backend, of a family of transformers."""
    return find_images(f"{family}ImageProcessorPil", "pil")(**settings)


def make_recipe(family: str, fields: dict[str, Any], tokenizer: Any, processor: dict[str, Any], **parts: Any) -> Recipe:
    """Make a recipe by the name that the classes of a family of transformers begin with; ``fields``: of its config."""
    import transformers

    classes: Any = transformers
    config, model_class = getattr(classes, f"{family}Config"), getattr(classes, f"{family}ForConditionalGeneration")
    named = {"processor_class": f"{family}Processor", **processor}
    return Recipe(config(**fields), model_class, tokenizer, processor=named, **parts)


def llama(**fields: Any) -> Recipe:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = llama_tokenizer()
    return Recipe(LlamaConfig(**text_fields(tokenizer, **fields)), LlamaForCausalLM, tokenizer)


def mistral() -> Recipe:
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = llama_tokenizer()
    return Recipe(MistralConfig(**text_fields(tokenizer, sliding_window=24)), MistralForCausalLM, tokenizer)


def llama_512x8() -> Recipe:
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    return llama(**wide, vocab_size=MIDSIZE_VOCABULARY)
