"""Ends what a transfer that broke off was to bring, and keeps what it has brought: whole blocks of KV, and features.

Where a prompt streams while it is prefilled, its first blocks are at the target long before the prefill ends. A source
that is lost then takes the request with it, but not these: each is published under the key of its text once all its
layers are here and its source has no more to write in it, and is reported ahead of the end, so that the next life of
the request finds it (decision 0094). A pull that has not ended counts for nothing, as in ``outlive_source``.
"""

from __future__ import annotations

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import tell_cached
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Failure
from trinity.core.migration.kv_target import publish_kv


def end_transfer(s: State, state: RequestState, now: float, why: Failure) -> None:
    """End a request whose transfer to here broke off, and report what of it is cached here ahead of that."""
    keep_whole_blocks(s, state)
    tell_cached(s, state)
    end(s, state, now, "error", why)


def keep_whole_blocks(s: State, state: RequestState) -> None:
    """Publish the first blocks of an incoming prompt that are here as a whole, and are not written again."""
    incoming = state.incoming
    if incoming is None or incoming.released or incoming.progress is None:
        return
    publish_kv(s, state, incoming.progress.count_whole() * s.settings.kv_block_size)
