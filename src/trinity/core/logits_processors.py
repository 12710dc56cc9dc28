"""Logits processors: functions of a user that change a row of logits before its token is chosen, known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trinity.errors import ConfigError, UnknownName
from trinity.errors.arguments import show
from trinity.plugins import list_names, load_plugin

LogitsProcessor = Callable[[Sequence[int], Sequence[int], Any], Any]
"""Takes the token ids of the prompt and of the output so far, and logits (a tensor [vocabulary], float32, its own
copy); returns logits of the same shape. It is called again for the same token where a step is repeated, and for a
request that moves to another instance there: what it returns may depend on its arguments alone."""
LOGITS_PROCESSORS = "trinity.logits_processors"  # the group of entry points
_registered: dict[str, LogitsProcessor] = {}
_loaded: dict[str, LogitsProcessor] = {}


def register_logits_processor(name: str, processor: LogitsProcessor) -> None:
    """Make a function known as ``Sampling(logits_processor=name)`` in this process; None forgets the name.

    Instances in processes of their own know those of the entry points ``trinity.logits_processors`` alone. Raises
    ``ConfigError`` for what is no name or cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a logits processor needs a name, got {show(name)}")
    if processor is None:
        _registered.pop(name, None)
    elif callable(processor):
        _registered[name] = processor
    else:
        raise ConfigError(f"the logits processor {name!r} must be a function, got {show(processor)}")


def find_logits_processor(name: str, *, registered: bool = True) -> LogitsProcessor:
    """Find a processor by name, with ``registered`` those of this process too.

    Raises ``UnknownName`` if there is none, ``ConfigError`` if it cannot be loaded or called.
    """
    found = (_registered.get(name) if registered else None) or _loaded.get(name)
    return found if found is not None else _load(name, registered)


def _load(name: str, registered: bool) -> LogitsProcessor:
    known = list_names(LOGITS_PROCESSORS, _registered if registered else ())
    if name not in known:
        hint = f"Packages add theirs by the entry point {LOGITS_PROCESSORS}"
        if registered:
            raise UnknownName("logits processor", name, known, f"{hint}; a program by register_logits_processor().")
        raise UnknownName("logits processor", name, known, f"{hint}: instances in processes know no others.")
    found = load_plugin(LOGITS_PROCESSORS, "logits processor", name)
    if not callable(found):
        raise ConfigError(f"logits processor {name!r} must be a function, got {show(found)}")
    _loaded[name] = found
    loaded: LogitsProcessor = found
    return loaded
