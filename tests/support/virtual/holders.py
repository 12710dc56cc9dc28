"""Holders of each block of an instance, counted from all that it remembers."""

from __future__ import annotations

from collections import Counter

from trinity.core.instance.state import State
from trinity.core.messages import KV, STATE


def check_states(s: State) -> None:
    """Check that a request holds one block of states while it holds KV, and none before or after; or never any."""
    for request, state in s.requests.items():
        due = STATE in s.pools and bool(state.block_table)
        assert len(state.state_block) == due, f"{s.settings.name}: {request} holds {state.state_block} beside its KV"


def count_holders(s: State, kind: str) -> Counter[int]:
    """Count the holders of each block of a kind: requests, leases, and fetches of a prefix."""
    holders: Counter[int] = Counter()
    for state in s.requests.values():
        features = [block for slot in state.media for block in slot.blocks]
        holders.update({KV: state.block_table, STATE: state.state_block}.get(kind, features))
    for lease in s.outgoing.values():
        holders.update(dict(lease.by_kind).get(kind, ()))
    for fetch in s.prefix_fetches.values():
        holders.update((*fetch.ahead, *fetch.places) if kind == KV else ())
    return holders
