"""Requests that an instance gets all at once, however slowly they are prepared."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from trinity.pipeline import Pipeline

PATIENCE_S = 100.0


def arrive_together(pipe: Pipeline, count: int) -> None:
    """Have the pipeline's only instance run no step before ``count`` requests are there.

    Call it before the first request. What a pool does that is too small for all depends on no clock then.
    """
    (host,) = pipe.hosts.values()
    there, until = host.core.state.requests, time.monotonic() + PATIENCE_S
    held = True

    def behind_arrivals(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(*args: Any) -> Any:
            nonlocal held
            while held and len(there) < count:
                assert time.monotonic() < until, f"{len(there)} of {count} requests came in {PATIENCE_S} s"
                time.sleep(0.001)
            held = False
            return call(*args)

        return called

    for stage in host.loaded.stages:
        for name in {"forward", "launch"} & set(dir(stage)):
            setattr(stage, name, behind_arrivals(getattr(stage, name)))
