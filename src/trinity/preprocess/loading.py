"""Loading of a model's config, tokenizer and own processor, without torchvision: always with the PIL backend.

PIL and torchvision yield different pixels, so that one backend is used everywhere, whatever is installed.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import ConfigError, UnsupportedModel
from trinity.preprocess.placeholder_runs import Runs
from trinity.preprocess.prompt import Placeholder

_MOST_KNOWN = 64  # texts of which a tokenizer's answer is kept: of the size of a prompt each
_VIDEO_FIELDS = (
    "merge_size",
    "patch_size",
    "temporal_patch_size",
    "slice_mode",
    "downsample_mode",
    "num_frames",
    "fps",
)


class ImageText(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's images stand in raw text: ``marker`` around the processor's own token.

    ``atomic``: attention is bidirectional inside an image, so that no chunk may cut it.
    """

    marker: str = "{token}"
    atomic: bool = False


_QWEN = ImageText(marker="<|vision_start|>{token}<|vision_end|>")
IMAGE_TEXT: dict[str, ImageText] = {
    "gemma3": ImageText(atomic=True),
    "idefics3": ImageText(),
    "internvl": ImageText(),
    "llava": ImageText(),
    "llava_next": ImageText(),
    "llava_onevision": ImageText(),
    "minicpmv4_6": ImageText(),
    "mistral3": ImageText(),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": ImageText(),
}
"""By transformers' ``model_type``. Add yours where ``<image>`` in raw text means more than the processor's token."""


class LoadedProcessor(msgspec.Struct, frozen=True):
    """``processor`` is None for text-only models; ``spoken`` yields the text that it gave its tokenizer last.

    ``runs`` is how texts with expanded placeholders are to be tokenised.
    """

    config: Any
    tokenizer: Any
    processor: Any
    spoken: threading.local
    eos_ids: frozenset[int]
    placeholders: dict[str, Placeholder]
    media_token_ids: frozenset[int]
    runs: Runs
    atomic: bool = False


def load(model_dir: Path) -> LoadedProcessor:
    """Everything the request processor needs from a model directory. Raises ``ConfigError``, ``UnsupportedModel``."""
    check_directory(model_dir)
    config = _load_config(model_dir)
    with _explained(f"the tokenizer in {str(model_dir)!r} cannot be loaded", ConfigError):
        from transformers import AutoTokenizer

        load_tokenizer: Any = AutoTokenizer.from_pretrained
        tokenizer = load_tokenizer(model_dir, local_files_only=True)
        tokenizer("")  # drops padding and truncation that the file may ask for, before threads share it
    spoken, media_ids = threading.local(), _media_ids(config)
    with _explained(f"the processor of model type {config.model_type!r} cannot be loaded", UnsupportedModel):
        runs = Runs(tokenizer, sorted(media_ids))
        processor = load_processor(model_dir, config, recording(tokenizer, spoken))
    eos_ids = _eos_ids(model_dir, config, tokenizer)
    if processor is None:
        _check_text_only(config)
        return LoadedProcessor(config, tokenizer, None, spoken, eos_ids, {}, frozenset(), runs)
    part_channels(processor.image_processor)
    text = IMAGE_TEXT.get(config.model_type, ImageText())
    placeholders = {"image": _placeholder(config, tokenizer, processor, text, media_ids)}
    return LoadedProcessor(config, tokenizer, processor, spoken, eos_ids, placeholders, media_ids, runs, text.atomic)


def check_directory(model_dir: Path) -> None:
    """Raise ``ConfigError`` where there is no checkpoint."""
    if not (model_dir / "config.json").is_file():
        missing = "has no config.json" if model_dir.is_dir() else "does not exist"
        raise ConfigError(
            f"model directory {str(model_dir)!r} {missing}; give the directory of a transformers checkpoint"
        )


def recording(tokenizer: Any, spoken: threading.local) -> Any:
    """A twin of ``tokenizer`` that leaves the text of each call in ``spoken.text``, per thread.

    It never pads or truncates: that would change the shared Rust tokenizer while other threads read it. It keeps some
    answers: images of one size have the same text.
    """
    known: dict[str, Any] = {}

    class Recording(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
            spoken.text = text if isinstance(text, str) else text[0]
            asked = repr((text, args, sorted(kwargs.items())))
            answer = known.get(asked)
            if answer is None:
                answer = super().__call__(text, *args, **{**kwargs, "padding": False, "truncation": False})
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[asked] = answer
            return copy.copy(answer)  # processors write what they add to it into it

    twin = copy.copy(tokenizer)
    twin.__class__ = Recording
    return twin


def part_channels(images: Any) -> None:
    """Have an image processor move an image's channels apart in memory before it rescales them.

    Its arrays are [channels, height, width] over bytes in the order of pixels, where numpy takes a channel's mean from
    three numbers at a time: three times as long. What it computes stays the same, to the bit.
    """
    import numpy as np

    class Parted(type(images)):  # type: ignore[misc]
        def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
            return super().rescale(np.ascontiguousarray(image), *args, **kwargs)

    Parted.__name__ = type(images).__name__  # transformers keys settings by this name
    images.__class__ = Parted


def load_processor(model_dir: Path, config: Any, tokenizer: Any) -> Any:
    """The transformers processor in ``model_dir``, or None where the model has none (text only).

    A processor that asks for a video processor gets a stand-in without function.
    Raises whatever transformers raises on malformed files.
    """
    processor_class = _processor_class(model_dir, config)
    if processor_class is None:
        return None
    # Not from the package root: some releases hide the class there unless torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    load_images: Any = AutoImageProcessor.from_pretrained
    images = load_images(model_dir, backend="pil", local_files_only=True)
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": NoVideo(images)}
    settings, _ = processor_class.get_processor_dict(str(model_dir), local_files_only=True)
    settings["chat_template"] = settings.get("chat_template") or tokenizer.chat_template
    wanted = [parts[name] for name in processor_class.get_attributes()]
    return _accepting_stand_in(processor_class).from_args_and_dict(wanted, settings)


def _processor_class(model_dir: Path, config: Any) -> Any:
    """The class named by the checkpoint's files, else the one that transformers knows for this config."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    for name in ("processor_config.json", "preprocessor_config.json"):
        named = _read_json(model_dir / name).get("processor_class")
        if isinstance(named, str) and hasattr(transformers, named):
            return getattr(transformers, named)
    return PROCESSOR_MAPPING.get(type(config), None)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigError(f"{str(path)!r} is not valid JSON ({exc})") from exc
    return content if isinstance(content, dict) else {}


def _accepting_stand_in(processor_class: Any) -> Any:
    class WithoutVideo(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if isinstance(argument, NoVideo):
                return NoVideo
            return super().check_argument_for_proper_class(argument_name, argument)

        def __repr__(self) -> str:  # transformers' own writes every part as JSON, which the stand-in is not
            return str(processor_class.__name__)

    WithoutVideo.__name__ = processor_class.__name__  # transformers keys settings by this name
    return WithoutVideo


class NoVideo:
    """Fills the place of a video processor, which would need torchvision; ``images`` lends it its sizes."""

    model_input_names: tuple[str, ...] = ()

    def __init__(self, images: Any) -> None:
        for name in _VIDEO_FIELDS:
            setattr(self, name, getattr(images, name, None))


def _load_config(model_dir: Path) -> Any:
    from transformers import AutoConfig

    _read_json(model_dir / "config.json")
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as exc:
        raise UnsupportedModel(
            f"{str(model_dir)!r} is of no architecture that transformers knows; {_how_to()}"
        ) from exc


def _how_to() -> str:
    known = ", ".join(sorted(IMAGE_TEXT))
    return (
        f"known are {known}, and text-only causal language models. To add one: its processor needs an image_token and "
        "its config an image_token_id; describe its markers in trinity.preprocess.loading.IMAGE_TEXT, and register a "
        "model adapter under the entry point group trinity.models"
    )


@contextmanager
def _explained(what: str, error: type[ConfigError]) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as exc:  # transformers lets whatever its readers raise through
        hint = _how_to() if error is UnsupportedModel else "is the checkpoint complete?"
        raise error(f"{what} ({type(exc).__name__}: {exc}); {hint}") from exc


def _check_text_only(config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(f"model type {config.model_type!r} is no causal language model; {_how_to()}")


def _placeholder(
    config: Any, tokenizer: Any, processor: Any, text: ImageText, media_ids: frozenset[int]
) -> Placeholder:
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or not media_ids:
        raise UnsupportedModel(f"model type {config.model_type!r} names no placeholder for images; {_how_to()}")
    reserved = tuple(tokenizer.convert_ids_to_tokens(sorted(media_ids)))
    return Placeholder(token=token, marker=text.marker.format(token=token), reserved=reserved)


def _media_ids(config: Any) -> frozenset[int]:
    ids = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return frozenset(number for number in ids if isinstance(number, int))


def _eos_ids(model_dir: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """As generate() finds them: the generation config's, else the model config's, else the tokenizer's."""
    text = config.get_text_config()
    named = _read_json(model_dir / "generation_config.json").get("eos_token_id")
    for ids in (named, getattr(config, "eos_token_id", None), getattr(text, "eos_token_id", None)):
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else frozenset()
