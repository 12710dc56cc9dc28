"""Encode-only requests: their features are copied for their reader, and they end; they have no KV and no token."""

from __future__ import annotations

from trinity.core.instance.lifecycle import conclude_if_quiet, end
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import ENCODED, Collected


def collect_features(s: State, state: RequestState, now: float) -> None:
    """Command the copy of a request's features, all of which are ready. It holds their blocks until that has ended."""
    s.move(state, Phase.COLLECTING, now)
    s.command(state.collect())


def handle_collected(s: State, event: Collected, now: float) -> None:
    """End the request with its features, unless it has been ended, or they could not be copied."""
    state = s.requests[event.request]
    assert state.collecting, f"nothing of {event.request} is being copied"
    state.take_rows(event.rows)
    if state.ending is not None:
        conclude_if_quiet(s, state, now)
    elif event.failure is not None:
        end(s, state, now, "error", event.failure)
    else:
        end(s, state, now, ENCODED)
