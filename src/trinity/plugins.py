"""What other packages add by entry points: transports, models, stages, routing policies."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from trinity.errors import ConfigError, UnknownName


def known(group: str, built_in: Iterable[str] = ()) -> list[str]:
    """Names of a group such as ``trinity.transports``, trinity's own included."""
    return sorted({*built_in, *(entry.name for entry in entry_points(group=group))})


def find(group: str, what: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """The object that some package registered under this name. Raises ``UnknownName``, or ``ConfigError`` if broken."""
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:  # other people's code
            raise ConfigError(f"{what} {name!r} ({entry.value}) cannot be loaded: {error!r}") from error
    hint = f"Other packages add theirs by the entry point {group}; or pass an object."
    raise UnknownName(what, name, known(group, built_in), hint)
