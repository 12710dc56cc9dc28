"""Adapters by ``config.model_type``: built in, from entry points ``trinity.models``, or registered at run time."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint import model_types
from trinity.preprocess.checkpoint.model_types import ENTRY_POINTS, PROVEN
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.families import ADAPTERS
from trinity.stages.models.generic import GenericAdapter

HOW_TO_ADD = (
    "To add one, subclass trinity.stages.models.ModelAdapter and name it in an entry point of group "
    f'"{ENTRY_POINTS}" (model_type = "package:Class"), or call register_adapter(model_type, Class).'
)

_adapters = dict(ADAPTERS)
# Text models known to be exact as such; in a multimodal model the one that it was proven with (PROVEN), and no other.
_TEXT_MODELS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}
)


def is_known_text(adapter: ModelAdapter) -> bool:
    """Tell if the text model is known to be exact, whichever model it is part of."""
    return adapter.text_config.model_type in _TEXT_MODELS


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Register ``adapter`` for ``model_type`` in this process.

    Who registers one answers for its towers and for how its media are laid out: nothing of them is compared with
    ``generate()`` here. Its text model passes the self-check at load, unless it is known to be exact.
    """
    _adapters[model_type] = adapter
    model_types.registered.add(model_type)


def known_models() -> list[str]:
    """List every ``model_type`` that has an adapter, sorted."""
    return sorted({*_adapters, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def find_adapter(config: Any, directory: Path | None = None) -> tuple[ModelAdapter, bool]:
    """Find the adapter for ``config``; the second result is False if the model must pass the self-check.

    ``directory`` (None): its checkpoint, whose proof is asked for where the type is not listed.

    Raises ``UnsupportedModel`` if a multimodal type or its vision tower is not proven, because a check on text would
    not show how its media are laid out and attended to, if the adapter sees no media in a config that has some, or if
    an entry point names something that is no ModelAdapter.
    """
    facts = model_types.check_config(config, directory)
    if facts is not None:
        generic = GenericAdapter(config, facts)
        return generic, is_known_text(generic)
    kind = _adapters.get(config.model_type) or _from_entry_point(config.model_type)
    adapter = (kind or ModelAdapter)(config)
    if kind is None and adapter.text_config is not config:
        known = ", ".join(known_models())
        raise UnsupportedModel(f"no adapter for the multimodal {config.model_type!r}. Known: {known}. {HOW_TO_ADD}")
    found = model_types.media_fields(config)
    if found and not adapter.multimodal:
        raise UnsupportedModel(
            f"{config.model_type!r} has {', '.join(found[:4])} in its config, and {type(adapter).__name__} sees no "
            "media in it: as a text model it would drop them. Write a ModelAdapter whose media_tokens names them"
        )
    return adapter, kind is not None and _is_proven_text(config.model_type, adapter.text_config.model_type)


def _is_proven_text(model_type: str, text: str) -> bool:
    if model_type in PROVEN and model_type not in model_types.registered:
        return text == PROVEN[model_type].text
    return text in _TEXT_MODELS


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
