"""A front end whose requests survive losses: one of them is at D0, with two tokens out, in ``AT_D0``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from support.core_tables import Row, brief, emitted, make_frontend, sent, work
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import End, FrontendCore
from trinity.core.messages import Emit, Failure, Finished, Moved, Sampled, Submit, Value


def recovering(peers: str = "E0 P0 P1 D0 D1", **policy: Any) -> FrontendCore:
    return make_frontend(peers, failures=FailurePolicy(**policy))


def change_policy(core: FrontendCore, failures: FailurePolicy) -> None:
    """Have a front end that is made already survive losses by this policy."""
    core.options = replace(core.options, failures=failures)
    core.dispatch.failures = core.inputs.failures = core.poison.failures = failures


def emit(name: str, attempt: int, *tokens: tuple[int, int]) -> Emit:
    return emitted(*((name, attempt, index, Sampled(token)) for index, token in tokens))


def told(name: str, attempt: int, error: str = "MigrationError", cause: str = "", **fields: Any) -> Finished:
    why = Failure(error, "it went wrong", {"cause": cause} if cause else {})
    return Finished(request=name, attempt=attempt, reason="error", failure=why, **fields)


def table(core: FrontendCore, rows: Iterable[Row], now: float = 0.0) -> None:
    for number, (event, expected) in enumerate(rows):
        found = brief(core.handle(event, now))
        assert found == expected, f"row {number}, {event}: {found}"


def quiet(core: FrontendCore) -> None:
    assert (core.entries, core.lives, core.waiting, core.next_timer()) == ({}, {}, 0, None)
    assert (core.inputs.waiting_bytes, core.inputs.kept_bytes) == (0, 0)


TO_P0, TO_D0 = Moved("r", 0, "P0", 1), Moved("r", 0, "D0", 2, 0, "P0", 0)
AT_D0: list[Row] = [
    (Submit(work("r", "cat", 1, max_tokens=4)), ["E0: submit r"]),
    (TO_P0, []),
    (emit("r", 0, (0, 5)), ["deliver r#0=5"]),
    (TO_D0, []),
    (emit("r", 0, (1, 6)), ["deliver r#1=6"]),
]
LEFT = ["E0: forget r", "P0: forget r", "D0: forget r", "P0: submit r~1.1"]  # P0 has the prompt cached


def end_of(out: list[Value]) -> End:
    (end,) = [each for each in out if isinstance(each, End)]
    return end


def submitted(out: list[Value]) -> Submit:
    (again,) = sent(out, Submit)
    return again
