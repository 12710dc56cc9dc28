"""Display: whether somebody watches standard error, where bars of long work are drawn."""

from __future__ import annotations

import sys


def is_display_watched() -> bool:
    """Check if standard error is a terminal, or this runs in a notebook's kernel."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
