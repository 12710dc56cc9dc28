"""Tokenizer and processor of a checkpoint in another's format: transformers' own classes, told its settings.

Nothing is written, and no code of the checkpoint is run (decision 0118).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.internvl_chat import CONTEXT_TOKEN, IMAGE_ENDS, count_image
from trinity.preprocess.checkpoint.internvl_config import find_conversation, read_chat_fields
from trinity.preprocess.checkpoint.libraries import how_to_install
from trinity.preprocess.checkpoint.processor_parts import NoVideo
from trinity.preprocess.checkpoint.token_files import read_json_file
from trinity.preprocess.checkpoint.video_processors import find_images

PROCESSOR = "InternVLProcessor"
_MODEL = "tokenizer.model"
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the original has them
_SPLITTERS = ("InternLM2Tokenizer", "InternLM2TokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast")
# Those give the texts between special tokens to sentencepiece as they are; the first two are code of the checkpoint.
_TOKENIZERS = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
_LIBRARIES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # with their modules
_PROBES = ("a b", " a  b ", "\n a\n\nb", "<a> 1,234.5 [b]", "ﬁ ① é 你好", "\t🙂")
"""Texts on which a conversion is compared with the library of the original."""


def load_internvl_tokenizer(directory: Path) -> Any:
    """Load the tokenizer as one of transformers', with a chat template of the original's conversation.

    Raises ``ConfigError`` and ``UnsupportedModel``, and what transformers raises on malformed files.
    """
    import transformers

    fields = read_json_file(directory / "tokenizer_config.json")
    named = _check_class(fields, directory)
    further = dict(zip(("start_image_token", "end_image_token"), IMAGE_ENDS, strict=True))
    # No token of a video: its name stands for what is there already, or a token would be added behind the model's.
    further |= dict.fromkeys(("context_image_token", "video_token"), CONTEXT_TOKEN)
    split, more = named in _SPLITTERS, dict[str, Any]()
    if split:
        _check_libraries(directory)
        named, more = "PreTrainedTokenizerFast", {"add_bos_token": fields.get("add_bos_token", True)}
    load: Any = getattr(transformers, named).from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False, extra_special_tokens=further, **more)
    if split:
        _compare(found, directory)
    template = find_conversation(read_chat_fields(directory), directory).make_template(f"{CONTEXT_TOKEN}\n")
    found.chat_template = template
    return found


def _check_class(fields: dict[str, Any], directory: Path) -> str:
    named = fields.get("tokenizer_class")
    if named not in (*_SPLITTERS, *_TOKENIZERS):
        raise UnsupportedModel(
            f"the tokenizer of {str(directory)!r} is of the class {show(named)}: {', '.join(_SPLITTERS)}, "
            f"{', '.join(_TOKENIZERS)} are converted"
        )
    if fields.get("legacy") is False and named in _SPLITTERS:
        raise UnsupportedModel(
            f"the tokenizer of {str(directory)!r} says legacy=false: its class treats a space at the beginning of a "
            "text apart, which is not converted"
        )
    return str(named)


def _check_libraries(directory: Path) -> None:
    if not (directory / _MODEL).is_file():
        raise ConfigError(f"{str(directory)!r} has no {_MODEL}, of which its tokenizer is made; is it complete?")
    lacking = [name for name, module in _LIBRARIES.items() if not _is_here(module)]
    if lacking:
        raise ConfigError(
            f"{str(directory / _MODEL)!r} is read with {' and '.join(lacking)}, not installed here: "
            f"{how_to_install(' '.join(lacking))}"
        )


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def _compare(found: Any, directory: Path) -> None:
    """Compare a converted model of sentencepiece with the library's. Raises ``UnsupportedModel`` where it differs."""
    from sentencepiece import SentencePieceProcessor

    own: Any = SentencePieceProcessor(model_file=str(directory / _MODEL))
    for text in _PROBES:
        if own.encode(text) != found(text, add_special_tokens=False)["input_ids"]:
            raise UnsupportedModel(
                f"{str(directory / _MODEL)!r} makes other tokens of {text!r} than transformers' conversion of it, "
                "which knows no spaces in front, and no text that is rewritten first"
            )


def make_internvl_processor(kind: Any, directory: Path, tokenizer: Any) -> Any:
    """Make the processor that cuts images as the original's ``load_image``, of a class ``kind`` of transformers."""
    side, most, tokens = count_image(read_chat_fields(directory))
    images = find_images("GotOcr2ImageProcessorPil", "pil")(
        size={"height": side, "width": side},
        image_mean=list(_MEAN),
        image_std=list(_DEVIATION),
        crop_to_patches=True,
        do_convert_rgb=False,  # images come as RGB, without the colour that their files call transparent
        min_patches=1,
        max_patches=most,
    )
    made = kind(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=NoVideo(images),
        image_seq_length=tokens,
        chat_template=tokenizer.chat_template,
    )
    made.video_token = None  # the original has none
    return made
