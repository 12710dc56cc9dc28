"""An engine without a model, for tests of what measures engines: started as a real one is, ``python FILE FD SETTINGS``.

Token n of a request is (sum of its prompt ids + n) modulo 97. ``options`` has it misbehave.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from trinity.bench.engines.wire import ServerWire, TokenUpdate, WireMessage, serve_engine


def right(request: WireMessage) -> list[int]:
    return [(sum(request["ids"]) + n) % 97 for n in range(request["tokens"])]


class Fake:
    def __init__(self, settings: WireMessage, wire: ServerWire | None = None) -> None:
        self.wire = wire
        if settings["options"].get("silent"):
            time.sleep(60)
        self.options = settings["options"]
        if self.options.get("dies"):
            raise SystemExit("no such luck")
        self._running: list[list[object]] = []
        self.about = {"version": "1", "engine": "fake", "tokens": settings["tokens"], "dtype": settings["dtype"]}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def add(self, request: WireMessage) -> None:
        if request["text"] == "refuse":
            raise ValueError("it is refused")
        if request["text"] == "die":
            sys.exit("it died")
        if request["text"] == "babble" and self.wire is not None:
            self.wire.send({"no": "such thing"})
            return
        tokens = right(request)[: len(right(request)) - self.options.get("lacks", 0)]
        self._running.append([request["id"], [each + self.options.get("wrong", 0) for each in tokens]])

    def step(self) -> Iterator[TokenUpdate]:
        """One token of every request, as a batch takes it."""
        time.sleep(self.options.get("step_s", 0.001))
        running, self._running = self._running, []
        for number, tokens in running:
            first, rest = tokens[:1], tokens[1:]  # type: ignore[index]
            if rest:
                self._running.append([number, rest])
            yield number, first, "" if rest else "length"  # type: ignore[misc]


if __name__ == "__main__":
    connected = ServerWire(int(sys.argv[1]))
    serve_engine(Fake(json.loads(sys.argv[2]), connected), connected)
