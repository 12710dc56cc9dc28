"""What readers of a virtual cluster must have got: each token once, in order, and one end, whole or typed."""

from __future__ import annotations

from support.virtual.cluster import VirtualCluster

TYPED = {
    "PoisonRequest",
    "BadMedia",
    "StageError",
    "RequestTooLarge",
    "Overloaded",
    "MigrationError",
    "DeadlineExceeded",
    "RequestError",
}


def check_readers(cluster: VirtualCluster) -> None:
    """Every reader has one end and each token once, in order: all of them, unless it left or has a typed error."""
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert outcome.tokens == list(range(1, len(outcome.tokens) + 1))
        if outcome.end.reason == "length":
            assert len(outcome.tokens) == outcome.work.max_tokens
        assert outcome.end.failure is None or outcome.end.failure.error in TYPED
