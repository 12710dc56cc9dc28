"""Loading of a model's own processor without torchvision: always with the PIL backend.

PIL and torchvision yield different pixels, so that one backend is used everywhere, whatever is installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_VIDEO_FIELDS = ("merge_size", "patch_size", "temporal_patch_size", "slice_mode", "downsample_mode")


def load_processor(model_dir: Path, config: Any, tokenizer: Any) -> Any:
    """The transformers processor in ``model_dir``, or None where the model has none (text only).

    A processor that asks for a video processor gets a stand-in without function.
    Raises whatever transformers raises on malformed files.
    """
    processor_class = _processor_class(model_dir, config)
    if processor_class is None:
        return None
    from transformers import AutoImageProcessor

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
    content = json.loads(path.read_text(encoding="utf-8"))
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
