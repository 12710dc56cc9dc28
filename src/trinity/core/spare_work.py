"""Spare: the word between instances of one stage about work that waits at one of them while another has none."""

from __future__ import annotations

from typing import Literal

from trinity.core.values import Value

Said = Literal["want", "have", "take", "no", "none"]


class Spare(Value, frozen=True):
    """Instance ``name`` to a sibling, of requests that have not begun.

    ``said``: want (I have nothing to do: tell me once something waits), have (something waits here), take (I still have
    nothing to do: hand it over), no (I have by now), or none (nothing waits here any more). A Submit answers take, too.
    """

    name: str
    said: Said
