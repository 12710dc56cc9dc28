"""What other packages add by entry points: transports, models, stages, routing policies."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from trinity.errors import UnknownName


def known(group: str, built_in: Iterable[str] = ()) -> list[str]:
    """Names of a group such as ``trinity.transports``, trinity's own included."""
    return sorted({*built_in, *(entry.name for entry in entry_points(group=group))})


def find(group: str, what: str, name: str, built_in: Iterable[str] = ()) -> Any:
    """The object that some package registered under this name. Raises ``UnknownName`` listing those known."""
    for entry in entry_points(group=group, name=name):
        return entry.load()
    hint = f"Other packages add theirs by the entry point {group}; or pass an object."
    raise UnknownName(what, name, known(group, built_in), hint)
