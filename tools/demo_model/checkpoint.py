"""The demo's model before it is trained: a LLaVA of 1.2 M parameters, its tokenizer, chat template and image processor.

All of it is made here, from nothing: words are tokens, and a picture is 16 patches.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

from trinity.demo.questions import list_words

SIZE = 64  # pixels of an edge, once the image processor has scaled a picture
PATCH = 16
PATCHES = (SIZE // PATCH) ** 2
WIDTH = 128
VISION_LAYERS, TEXT_LAYERS = 3, 4
CONTEXT = 512  # tokens
PAD, BOS, EOS, UNKNOWN, IMAGE_TOKEN, USER, ASSISTANT = (
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "<image>",
    "USER:",
    "ASSISTANT:",
)
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN, IMAGE_TOKEN, USER, ASSISTANT)
# Images come before the words of their turn, wherever they stand in it: so it was trained.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}ASSISTANT: {% else %}USER: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image> {% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }} {% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


class DemoParts(NamedTuple):
    """Model, tokenizer and image processor, as transformers has them."""

    model: Any
    tokenizer: Any
    images: Any


def make_parts() -> DemoParts:
    """Make the parts of an untrained model; its weights are drawn by torch's own generator."""
    tokenizer = _make_tokenizer()
    return DemoParts(_make_model(tokenizer), tokenizer, _make_image_processor())


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *list_words()))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE_TOKEN},
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _make_model(tokenizer: Any) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    shared: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}
    vision = {**shared, "num_hidden_layers": VISION_LAYERS, "image_size": SIZE, "patch_size": PATCH}
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    text = {**shared, **ids, "num_hidden_layers": TEXT_LAYERS, "num_key_value_heads": 4, "vocab_size": len(tokenizer)}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, hidden_act="gelu", projection_dim=WIDTH),
        text_config=LlamaConfig(**text, max_position_embeddings=CONTEXT, tie_word_embeddings=True),
        image_token_index=tokenizer.image_token_id,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model: Any = LlavaForConditionalGeneration(config)
    model.float()
    for name, value in ids.items():
        setattr(model.generation_config, name, value)
    return model


def _make_image_processor() -> Any:
    from transformers import CLIPImageProcessorPil

    square, middle = {"height": SIZE, "width": SIZE}, [0.5] * 3
    return CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=square, image_mean=middle, image_std=middle)


def save_checkpoint(parts: DemoParts, directory: Path) -> None:
    """Write the parts in transformers' layout: weights rounded to bfloat16, to be computed with in float32."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(parts.model).to(torch.bfloat16).save_pretrained(directory)
    _edit_json(directory / "config.json", dtype="float32")
    parts.tokenizer.save_pretrained(directory)
    parts.images.save_pretrained(directory)
    fields = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (directory / "processor_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def load_weights(parts: DemoParts, directory: Path) -> None:
    """Read the weights of a checkpoint that ``save_checkpoint`` wrote into ``parts``."""
    import torch

    kind: Any = type(parts.model)
    whole = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    parts.model.load_state_dict(whole.state_dict())


def _edit_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **fields}, indent=2) + "\n", encoding="utf-8")
