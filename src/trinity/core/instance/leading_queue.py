"""LeadingQueue: requests that wait for image features and have text to prefill meanwhile (``leading_text``)."""

from __future__ import annotations

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.settings import Settings
from trinity.core.messages import KV, Work

AWAITS_FEATURES = frozenset({Phase.IMAGE_QUEUE, Phase.ENCODING, Phase.IMAGE_OFFER, Phase.IMAGE_PULL})


class LeadingQueue:
    """Requests that wait for features, in the order in which they began to, as long as text is left to prefill.

    - ``running``: the request that has such text in a step in flight; "" for none.
    """

    def __init__(self, settings: Settings) -> None:
        self._requests: dict[str, RequestState] = {}
        self._block = settings.kv_block_size if _is_on(settings) else 0
        self.running = ""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def first(self) -> RequestState | None:
        """Return the one that waits longest."""
        return next(iter(self._requests.values()), None)

    def requests(self) -> tuple[RequestState, ...]:
        """List those that wait, the first one first."""
        return tuple(self._requests.values())

    def follow(self, state: RequestState, before: Phase) -> None:
        """Keep pace with a request that has moved on from the phase ``before``."""
        if state.phase not in AWAITS_FEATURES:
            self.leave(state)
        elif before not in AWAITS_FEATURES and self._block and leading_blocks(state.work, self._block):
            self._requests[state.work.request] = state

    def leave(self, state: RequestState) -> None:
        """Take a request out, if it is here: it has its features, it ends, or nothing of its text is left."""
        self._requests.pop(state.work.request, None)

    def begin(self, request: str) -> None:
        """Note that a step prefills text of this request."""
        assert not self.running, f"text of {self.running} is in a step, and {request} begins"
        self.running = request

    def finish(self) -> None:
        """Note that this step has ended."""
        self.running = ""


def _is_on(settings: Settings) -> bool:
    rules = settings.rules
    caches = settings.prefix_cache and KV in settings.pools
    return rules.leading_text and rules.chunked and caches and "P" in settings.roles


def leading_blocks(work: Work, block: int) -> int:
    """Count the whole blocks of ``block`` positions ahead of the first image and of what sees it; 0 for nothing."""
    return work.media[0].uncut[0] // block if work.media and not work.encode_only else 0
