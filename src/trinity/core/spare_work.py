"""Spare: the word between instances of one stage about what waits at one of them while another could begin it."""

from __future__ import annotations

from typing import Literal

from trinity.core.values import Value

Said = Literal["want", "have", "take", "no", "sent", "none"]
WORK = ""  # kind of what is computed next where it goes: requests, and features for them


class Spare(Value, frozen=True):
    """Instance ``name`` to a sibling, of what has not begun: requests and features (``WORK``), or offered decodes (KV).

    ``said``: want (I have nothing to do, or room: tell me once something waits), have (something waits here, of so
    many ``blocks``), take (I still do, and have so many ``blocks``: hand it over), no (I do not by now), or none
    (nothing waits here any more, or what I was to offer you is not to come). A Submit answers take, too; of an offer,
    sent: ``source``, in its life ``epoch``, is to make it to you.
    """

    name: str
    said: Said
    kind: str = WORK
    blocks: int = 0
    source: str = ""
    epoch: int = 0
