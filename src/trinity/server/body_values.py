"""Bound on the values of a JSON text from outside, looked at before it is parsed."""

from __future__ import annotations

MOST_VALUES = 2 << 20  # of a body; a text with as many commas and brackets has more tokens than a context


def has_too_many_values(content: bytes) -> bool:
    """Tell if a JSON text may hold more than ``MOST_VALUES`` values.

    Separators are counted: 64 MiB of empty lists would keep the loop for seven seconds, and two gigabytes.
    """
    return len(content) > MOST_VALUES and sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES
