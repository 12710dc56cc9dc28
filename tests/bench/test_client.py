"""The client: an absolute schedule, latencies from the intended arrival, failures in the rows."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from support.fake_servers import FakeServer, asked, engine
from trinity.bench.client import replay_to_server
from trinity.bench.servers import BenchRequest, EngineSpec, ServerAnswer
from trinity.traces.trace import Trace, TraceRow


def offered(*times_ms: float, output: int = 3) -> Trace:
    return Trace(TraceRow(timestamp=at, input_length=2, output_length=output) for at in times_ms)


class Held:
    """A peer that answers when it is told to; ``stall_s`` blocks the client while it sends, as a slow one would be."""

    def __init__(self, stall_s: float = 0.0) -> None:
        self.engine, self.about, self.sessions = EngineSpec(label="held"), dict[str, Any](), list[int]()
        self.asked_at: list[float] = []
        self.answers: list[ServerAnswer] = []
        self._stall_s = stall_s

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def ask(self, request: BenchRequest) -> ServerAnswer:
        self.asked_at.append(time.monotonic())
        if self._stall_s and len(self.asked_at) == 1:
            until = time.monotonic() + self._stall_s
            while time.monotonic() < until:
                pass
        answer = ServerAnswer()
        self.answers.append(answer)
        asyncio.get_running_loop().call_later(0.01, self._answer, answer, request)
        return answer

    def _answer(self, answer: ServerAnswer, request: BenchRequest) -> None:
        for number in range(request.tokens):
            last = number == request.tokens - 1
            answer.add([number], "length" if last else "", time.monotonic())


class Silent(Held):
    def _answer(self, answer: ServerAnswer, request: BenchRequest) -> None:
        answer.add([1], "", time.monotonic())


async def test_requests_leave_on_an_absolute_schedule_whatever_becomes_of_others() -> None:
    peer = Held()
    trace = offered(1000, 1100, 1200, 1400)
    served = await replay_to_server(peer, trace, [asked(tokens=3)] * 4)
    gaps = [at - peer.asked_at[0] for at in peer.asked_at]
    early = (served[0].late_s or 0.0) + 0.001  # the first was late by as much, and the others do not wait for it
    assert all(gap >= due - early for gap, due in zip(gaps, (0.0, 0.1, 0.2, 0.4), strict=True))
    assert [row.timestamp for row in served] == [1000, 1100, 1200, 1400]
    for row in served:
        assert (row.output_length, row.finish_reason, len(row.itl_s)) == (3, "length", 2)
        assert row.ttft_s is not None
        assert row.ttft_s >= 0.01
        assert row.latency_s is not None
        assert row.latency_s >= row.ttft_s


async def test_what_the_client_is_late_by_is_in_the_ttft() -> None:
    served = await replay_to_server(Held(stall_s=0.2), offered(0, 50), [asked(tokens=3)] * 2)
    second = served[1]
    assert second.late_s >= 0.1
    assert second.ttft_s >= second.late_s


async def test_rows_come_back_in_the_traces_order() -> None:
    peer = Held()
    requests = [asked(tokens=3), asked(tokens=1), asked(tokens=2)]
    trace = Trace(TraceRow(timestamp=at, input_length=2, output_length=n) for at, n in ((60, 3), (0, 1), (30, 2)))
    served = await replay_to_server(peer, trace, requests)
    assert [row.output_length for row in served] == [3, 1, 2]
    assert [row.finish_reason for row in served] == ["length"] * 3


async def test_what_does_not_end_has_failed_after_patience() -> None:
    (row,) = await replay_to_server(Silent(), offered(0), [asked(tokens=3)], patience_s=0.1)
    assert (row.finish_reason, row.output_length, row.max_tokens) == ("error", 1, 3)
    assert row.ttft_s is not None


@pytest.mark.parametrize(("lacks", "reason"), [(0, "length"), (1, "error")])
async def test_fewer_tokens_than_asked_for_are_a_failure(lacks: int, reason: str, tmp_path: Path) -> None:
    async with FakeServer(engine(lacks=lacks), tmp_path) as server:
        served = await replay_to_server(server, offered(0, 20), [asked(1, tokens=3), asked(2, tokens=3)])
    assert {row.finish_reason for row in served} == {reason}
    assert {row.output_length for row in served} == {3 - lacks}
