"""FailurePolicy: the user's choice of what becomes of a request whose instance is lost, or that finds none."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.errors import ConfigError
from trinity.errors.arguments import Count, Number, Share, Whole, check_arguments


@check_arguments
@dataclass(frozen=True)
class FailurePolicy:
    """Fate of requests that lose their instance or their blocks by no fault of their own.

    Such a request goes on from its first stage, with the tokens that its reader has: none comes twice, none is missing.

    - ``recoveries`` (count, 2): times that a request goes on; 0: it ends with ``StageError`` or ``MigrationError``.
    - ``wait_s`` (seconds, 600): time that a request waits for a stage that no instance has just now, before it is
      ``Overloaded``; None: until its deadline.
    - ``retry_share`` (0.2), ``retry_floor`` (count, 8): so many go on at once after losses: a share of those
      in the front end, and at least. The others wait for their turn there, the oldest first.
    - ``deaths`` (count, 3): instances that die in a row while they have a request, before it is a ``PoisonRequest``.
      ``alone_after`` (count, 2): of them, after which it runs alone until it gets through: the next is its own.
    - ``kept_bytes`` (bytes, 1 GiB): of pixels kept for recoveries, of all requests; beyond it they are prepared again.

    Raises ``ConfigError``.
    """

    recoveries: Count = 2
    wait_s: Number | None = 600.0
    kept_bytes: Count = 1 << 30
    retry_share: Share = 0.2
    retry_floor: Whole = 8
    deaths: Whole = 3
    alone_after: Whole = 2

    def __post_init__(self) -> None:
        if self.alone_after >= self.deaths:
            text = f"alone_after ({self.alone_after}) must be below deaths ({self.deaths})"
            raise ConfigError(f"{text}: a request is refused for a death that is its own")

    def most_retries(self, requests: int) -> int:
        """Count those that may go on at once, of so many requests in the front end."""
        return max(self.retry_floor, int(self.retry_share * requests))


NO_RECOVERY = FailurePolicy(recoveries=0, wait_s=0.0)
