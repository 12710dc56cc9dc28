"""FailurePolicy: the user's choice of what becomes of a request whose instance is lost, or that finds none."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.errors.arguments import Count, Number, check_arguments


@check_arguments
@dataclass(frozen=True)
class FailurePolicy:
    """Fate of requests that lose their instance or their blocks by no fault of their own.

    Such a request goes on from its first stage, with the tokens that its reader has: none comes twice, none is missing.

    - ``recoveries`` (count, 2): times that a request goes on; 0: it ends with ``StageError`` or ``MigrationError``.
    - ``wait_s`` (seconds, 600): time that a request waits for a stage that no instance has just now, before it is
      ``Overloaded``; None: until its deadline.
    - ``kept_bytes`` (bytes, 1 GiB): of pixels kept for recoveries, of all requests; beyond it they are prepared again.

    Raises ``ConfigError``.
    """

    recoveries: Count = 2
    wait_s: Number | None = 600.0
    kept_bytes: Count = 1 << 30


NO_RECOVERY = FailurePolicy(recoveries=0, wait_s=0.0)
