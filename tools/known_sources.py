"""Compare the table of known sources with the installed transformers and torch: python tools/known_sources.py

Prints each class or function of the table whose source is none that was read, with its new fingerprint, and exits with
1 if there is one. Read the source again, as decision 0039 says; if it still computes what its part computes, add the
fingerprint to ``trinity/stages/kernels/known_sources.py`` beside the old one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from trinity.stages.kernels.admission import fingerprint_part
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, LayerPart


def named_sources() -> Iterator[tuple[LayerPart, str]]:
    """Each part with each name of the table, once."""
    for part, known in KNOWN_SOURCES.items():
        names = (name for text in known.values() for name in text.split() if ":" in name)
        yield from ((part, name) for name in dict.fromkeys(names))


def find_source(name: str) -> Any:
    """The class or function ``name``; None if there is none in this release."""
    module, _, member = name.partition(":")
    place = module if "." in module else f"transformers.models.{module}.modeling_{module}"
    try:
        return getattr(importlib.import_module(place), member, None)
    except ImportError:
        return None


def changed_sources() -> list[str]:
    """A line for each source that is not as it was read."""
    found = []
    for part, name in named_sources():
        source = find_source(name)
        now = "gone" if source is None else fingerprint_part(part, source)
        if now not in KNOWN_SOURCES[part]:
            found.append(f"{part.name}: read {name} again: it is {now} now; known: {', '.join(KNOWN_SOURCES[part])}")
    return found


def main() -> int:
    changed = changed_sources()
    print("\n".join(changed) or f"{sum(1 for _ in named_sources())} sources are as they were read")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
