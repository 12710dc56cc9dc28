"""Which adapter serves which ``config.model_type``: built in, from entry points ``trinity.models``, or registered."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from trinity.errors import UnsupportedModel
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.families import Gemma3, Idefics, Llava, LlavaOneVision, MiniCPM, TiledLlava

ENTRY_POINTS = "trinity.models"
HOW_TO_ADD = (
    "To add one, subclass trinity.stages.models.ModelAdapter and name it in an entry point of group "
    f'"{ENTRY_POINTS}" (model_type = "package:Class"), or call register_adapter(model_type, Class).'
)

_adapters: dict[str, type[ModelAdapter]] = {
    "llava": Llava,
    "llava_next": TiledLlava,
    "llava_onevision": LlavaOneVision,
    "qwen2_vl": ModelAdapter,
    "qwen2_5_vl": ModelAdapter,
    "qwen3_vl": ModelAdapter,
    "internvl": ModelAdapter,
    "smolvlm": Idefics,
    "idefics3": Idefics,
    "gemma3": Gemma3,
    "minicpmv4_6": MiniCPM,
    "llama": ModelAdapter,
    "mistral": ModelAdapter,
}
# Text models known to be served exactly inside or without a multimodal model; others prove it when they are loaded.
_TEXT_MODELS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
)


def known_text(adapter: ModelAdapter) -> bool:
    """Whether the text model is one that was looked at, whatever it is part of."""
    return adapter.text_config.model_type in _TEXT_MODELS


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Serve ``model_type`` with ``adapter`` in this process, without a self-check."""
    _adapters[model_type] = adapter


def known_models() -> list[str]:
    """Every ``model_type`` that has an adapter, sorted."""
    return sorted({*_adapters, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def adapter_for(config: Any) -> tuple[ModelAdapter, bool]:
    """The adapter for ``config``, and whether it is known to fit (else the model must pass a self-check).

    Raises ``UnsupportedModel`` where a multimodal type has no adapter (a check on text would not show how its media
    are laid out and attended to), or where an entry point names something that is no ModelAdapter.
    """
    kind = _adapters.get(config.model_type) or _from_entry_point(config.model_type)
    adapter = (kind or ModelAdapter)(config)
    if kind is None and adapter.text_config is not config:
        known = ", ".join(known_models())
        raise UnsupportedModel(f"no adapter for the multimodal {config.model_type!r}. Known: {known}. {HOW_TO_ADD}")
    text = adapter.text_config.model_type
    return adapter, kind is not None and (text == config.model_type or text in _TEXT_MODELS)


def _from_entry_point(model_type: str) -> type[ModelAdapter] | None:
    for point in entry_points(group=ENTRY_POINTS, name=model_type):
        try:
            found = point.load()
        except Exception as exc:
            raise UnsupportedModel(f"the adapter {point.value} for {model_type!r} cannot be imported: {exc}") from exc
        if not (isinstance(found, type) and issubclass(found, ModelAdapter)):
            raise UnsupportedModel(f"{point.value} for {model_type!r} is not a subclass of ModelAdapter")
        return found
    return None
