"""``FailurePolicy.kept_bytes``: a bound of the inputs that are really held for further lives, whatever happens."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, emitted, peer_up, work
from support.recovering import recovering, told
from trinity.core.frontend import Abort, FrontendCore
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import Prepare, Prepared
from trinity.core.frontend.turns import Inputs
from trinity.core.messages import Finished, Gone, PeerDown, Sampled, Submit, Tick, Value

BOUND = 100
PEERS = ("E0", "P0", "P1", "D0")


class Traffic:
    """A front end that draws events, and the sizes of the inputs that each request came with."""

    def __init__(self, seed: int) -> None:
        self.draw, self.now = Random(seed), 0.0
        self.core = recovering(" ".join(PEERS), kept_bytes=BOUND, recoveries=4, wait_s=5.0, retry_floor=2)
        self.sizes: dict[str, int] = {}
        self.epochs = dict.fromkeys(PEERS, 0)
        self.down: set[str] = set()
        self.asked: list[Prepare] = []
        self.seen: Counter[str] = Counter()

    def handle(self, event: Value) -> None:
        self.now += self.draw.choice([0.0, 0.01, 0.5])
        for command in self.core.handle(event, self.now):
            self.asked += [command] if isinstance(command, Prepare) else []
        check_bytes(self.core, self.sizes, self.seen)

    def step(self) -> None:
        kinds = [
            self.submit,
            self.submit,
            self.token,
            self.fail,
            self.lose,
            self.back,
            self.prepare,
            self.leave,
            self.end,
        ]
        self.draw.choice(kinds)()
        self.handle(Tick())

    def any_request(self) -> FrontendRequest | None:
        return self.draw.choice(list(self.core.entries.values())) if self.core.entries else None

    def submit(self) -> None:
        name = f"r{len(self.sizes)}"
        self.sizes[name] = self.draw.choice([0, 1, 30, 60, 100, 101])
        inputs = (bytes(self.sizes[name]),) if self.sizes[name] else ()
        self.handle(Submit(work(name, "cat", 1, max_tokens=4), inputs, input_bytes=self.sizes[name]))

    def token(self) -> None:
        entry = self.any_request()
        if entry is not None and not entry.waits:
            self.handle(emitted((entry.work.request, entry.work.attempt, entry.delivered, Sampled(5))))

    def fail(self) -> None:
        entry = self.any_request()
        if entry is not None and not entry.waits:
            self.handle(told(entry.work.request, entry.work.attempt, count=entry.delivered))

    def end(self) -> None:
        entry = self.any_request()
        if entry is not None and not entry.waits:
            own: dict[str, Any] = {"request": entry.work.request, "attempt": entry.work.attempt}
            self.handle(Finished(**own, reason="length", count=entry.delivered))

    def leave(self) -> None:
        entry = self.any_request()
        if entry is not None:
            self.handle(Abort(entry.id, "cancelled"))

    def lose(self) -> None:
        name = self.draw.choice(PEERS)
        if name not in self.down:
            self.down.add(name)
            self.handle(PeerDown(name))
            for entry in list(self.core.entries.values()):
                if entry.hops:
                    last = max(entry.hops)
                    self.handle(Gone(entry.work.request, entry.work.attempt, "E0", name, last, self.epochs[name]))

    def back(self) -> None:
        for name in sorted(self.down):
            self.epochs[name] += 1
            self.handle(replace(peer_up(name), epoch=self.epochs[name]))
        self.down.clear()

    def prepare(self) -> None:
        while self.asked:
            asked = self.asked.pop()
            self.handle(Prepared(asked.life, (bytes(self.sizes[asked.request]),), ("cat",)))


def check_bytes(core: FrontendCore, sizes: dict[str, int], seen: Counter[str]) -> None:
    """Recount: beyond the bound those that wait alone hold something, which ``max_waiting_bytes`` bounds."""
    held = {entry.id: sum(map(len, entry.inputs)) for entry in core.entries.values()}
    kept = sum(size for name, size in held.items() if not core.entries[name].dropped)
    assert kept == core.inputs.kept_bytes == sum(entry.kept_bytes for entry in core.entries.values())
    assert kept <= core.options.failures.kept_bytes
    assert core.inputs.waiting_bytes == sum(entry.input_bytes for entry in core.entries.values())
    for entry in core.entries.values():
        if entry.dropped and held[entry.id]:
            assert entry.waits, f"{entry.id} holds {held[entry.id]} bytes that are not to be kept"
            assert not entry.work.attempt, f"{entry.id} holds them for a later life"
            assert entry.input_bytes == held[entry.id], "counted among those that wait"
            seen["waits beyond the bound"] += 1
        if not entry.dropped:
            assert held[entry.id] == sizes[entry.id], f"{entry.id} lost what was to be kept"
            seen["kept"] += bool(held[entry.id])
        seen["dropped"] += entry.dropped
        seen["prepares"] += entry.preparing


def run(seed: int) -> Counter[str]:
    traffic = Traffic(seed)
    for _ in range(120):
        traffic.step()
    for entry in list(traffic.core.entries.values()):
        traffic.handle(Abort(entry.id, "cancelled"))
        own: dict[str, Any] = {"request": entry.work.request, "attempt": entry.work.attempt}
        traffic.handle(Finished(**own, reason="cancelled", count=entry.delivered))
    core = traffic.core
    assert (core.entries, core.inputs.kept_bytes, core.inputs.waiting_bytes) == ({}, 0, 0)
    return traffic.seen


def test_kept_bytes_bound_what_is_held_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += run(seed)
    assert not [each for each in ("waits beyond the bound", "kept", "dropped", "prepares") if seen[each] < 20], seen


def is_noticed() -> bool:
    for seed in range(60):
        try:
            run(seed)
        except AssertionError:
            return True
    return False


def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Inputs, entry: FrontendRequest) -> None:
        entry.kept_bytes = entry.input_bytes
        self.kept_bytes += entry.kept_bytes

    monkeypatch.setattr(Inputs, "_keep", keep)


def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inputs, "_keep", lambda self, entry: None)


def hoarding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that were not to be kept stay for a later life that waits."""
    wait = FrontendRequest.wait

    def keeping(self: FrontendRequest, *rest: Any) -> None:
        inputs = self.inputs
        wait(self, *rest)
        self.inputs = inputs

    monkeypatch.setattr(FrontendRequest, "wait", keeping)


@pytest.mark.parametrize("broken", [unbounded, uncounted, hoarding])
def test_a_bound_that_is_not_kept_is_noticed(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    assert is_noticed()


def test_a_request_beyond_the_bound_is_served_and_prepared_again() -> None:
    core = recovering("E0 P0 P1 D0", kept_bytes=BOUND)
    core.handle(Submit(work("r", "cat", 1), (bytes(101),), input_bytes=101), 0.0)
    assert (core.inputs.kept_bytes, core.entries["r"].inputs) == (0, ())
    assert brief(core.handle(told("r", 0), 1.0))[-1] == "prepare r~1.1"
