"""Plugins: transports, models, stages and routing policies that other packages add by entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from trinity.errors import ConfigError, UnknownName, describe_error


def list_names(group: str, built_in: Iterable[str] = ()) -> list[str]:
    """List the names in a group such as ``trinity.transports``, with those built in."""
    return sorted({*built_in, *(entry.name for entry in entry_points(group=group))})


def load_plugin(group: str, what: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """Load the object that a package registered as ``name``; ``what`` names its kind in errors.

    Raises ``UnknownName`` if there is none, ``ConfigError`` if it cannot be loaded.
    """
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # other people's code, which may call sys.exit() as it is imported
            why = describe_error(error)
            raise ConfigError(f"{what} {name!r} ({entry.value}) cannot be loaded: {why}") from error
    hint = f"Other packages add theirs by the entry point {group}; or pass an object."
    raise UnknownName(what, name, list_names(group, built_in), hint)
