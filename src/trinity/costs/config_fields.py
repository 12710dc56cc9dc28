"""Sizes read from the fields of a ``config.json``, by any of several names, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity.errors import ConfigError

ConfigFields = Mapping[str, Any]
LARGEST_SIZE = 1e15  # of any


def get_size(fields: ConfigFields, part: str, *names: str) -> int:
    """Get the first of these names that is present: families call the same thing differently.

    Raises ``ConfigError`` where none is, or it is below 1.
    """
    for name in names:
        value: Any = fields.get(name)
        if is_number(value) and value >= 1:
            return int(value)
    raise ConfigError(
        f"the {part} model's configuration has no {' or '.join(names)}: it must be a number of at least 1"
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_SIZE


def get_optional(fields: ConfigFields, part: str, name: str, default: int) -> int:
    """Get a size that may be left out, or be null or 0, for ``default``. Raises ``ConfigError`` for another value."""
    value = fields.get(name)
    return default if value is None or (is_number(value) and not value) else get_size(fields, part, name)


def get_ratio(fields: ConfigFields, part: str, name: str, default: float) -> float:
    """Get a factor above 0 that may be left out. Raises ``ConfigError`` for another value."""
    value = fields.get(name) or default
    if not is_number(value) or value <= 0:
        raise ConfigError(f"the {part} model's configuration has no {name}: it must be a number above 0, got {value!r}")
    return float(value)


def get_part(config: ConfigFields, name: str) -> ConfigFields:
    """Get a part of a configuration; empty where it is left out. Raises ``ConfigError`` where it is no mapping."""
    part = config.get(name) or {}
    if not isinstance(part, Mapping):
        raise ConfigError(f"{name} of a model's configuration is a mapping of names to values, got {part!r:.80}")
    return part
