"""Checks values of a checkpoint's config by their names: what this library's own code reads of it has one form each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.arguments import show

_Form = tuple[Callable[[Any], bool], str]


def _is_list(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_TEXTS: _Form = (_is_list(str), "a list of texts")
_WHOLE: _Form = (_is_list(int), "a list of whole numbers")
_FIELDS: _Form = (lambda value: isinstance(value, dict), "an object of JSON")
_FORMS: dict[str, _Form] = {
    "deepstack_visual_indexes": _WHOLE,
    "layer_types": _TEXTS,
    "layers_block_type": _TEXTS,
    "mrope_section": _WHOLE,
    "rope_parameters": _FIELDS,
    "rope_scaling": _FIELDS,
    "rope_type": _TEXT,
}


def check_form(name: str, place: str, value: Any, model_dir: Path) -> None:
    """Raise ``ConfigError`` if the value of this ``name``, which stands at ``place``, is of another type of JSON.

    None is left out, and so is a name that only transformers reads: it says itself what it lacks.
    """
    name = "rope_type" if name == "type" and "rope_" in place else name  # as older releases called it
    is_one, said = _FORMS.get(name, (None, ""))
    if is_one is not None and value is not None and not is_one(value):
        raise ConfigError(f"{str(model_dir)!r}: {place} is {said}, got {show(value)}; mend config.json")
