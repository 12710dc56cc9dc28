"""How many KV blocks a request is admitted with: its whole need, or its text's and a little (decision 0022)."""

from __future__ import annotations

from trinity.blocks import blocks_for
from trinity.core.state import RequestState, State
from trinity.routing import kv_tokens

LITTLE = 1  # blocks beyond those of its text that a request is admitted with


def grows(s: State) -> bool:
    """Whether requests grow here: those that do not decode here need no more than their text."""
    return s.settings.reservation == "optimistic" and "D" in s.settings.roles


def need(s: State, state: RequestState, text: int) -> int:
    """KV blocks that a request is admitted with, whose text of so many blocks is prefilled or pulled here."""
    if "D" not in s.settings.roles:
        return text
    whole = blocks_for(kv_tokens(state.work, decodes=True), s.settings.kv_block)
    return min(whole, text + LITTLE) if grows(s) else whole


def spare(s: State) -> int:
    """Blocks that admissions leave alone: one for each request that decodes, which will ask for it soon."""
    return len(s.decoding) if grows(s) else 0
