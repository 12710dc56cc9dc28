"""What a server under measurement and its client say: JSON, an object a line, over a socket. Standard library alone.

To the server: ``{"id", "text", "ids", "spans", "images", "tokens"}`` for each request: its prompt as text and as token
ids, (first, count) of each image's visual tokens among them, JPEGs in base64, and how many tokens to give. To the
client: first what the server says of itself, then ``{"out": [[id, tokens, end], ...]}`` for each step, ``end`` empty
while the request goes on, "length" at its end, else "error: ...".
"""

from __future__ import annotations

import base64
import io
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

Message = dict[str, Any]
Out = tuple[int, list[int], str]


class Engine(Protocol):
    """An engine that is told of requests and then stepped, all on one thread. ``add`` may raise: that request fails."""

    about: Message

    @property
    def busy(self) -> bool: ...

    def add(self, request: Message) -> None: ...

    def step(self) -> Iterable[Out]: ...


class Wire:
    """The server's end."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[Message]:
        """Until the client hangs up."""
        for line in self._file:
            yield json.loads(line)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def serve(engine: Engine, wire: Wire) -> None:
    """Say what the engine is, then add what comes and step, until the client hangs up."""
    asked: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(wire, asked), daemon=True).start()
    wire.send(about(engine.about))
    while True:
        while not engine.busy or not asked.empty():
            request = asked.get()
            if request is None:
                return
            _add(engine, wire, request)
        if out := list(engine.step()):
            wire.send({"out": out})


def about(engine: Message) -> Message:
    """What a server says first: of its process, and of its engine."""
    omp = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    return {"python": sys.version.split()[0], "process": os.getpid(), "omp": omp, **engine}


def _read(wire: Wire, asked: queue.SimpleQueue[Message | None]) -> None:
    try:
        for message in wire.messages():
            asked.put(message)
    finally:
        asked.put(None)


def _add(engine: Engine, wire: Wire, request: Message) -> None:
    try:
        engine.add(request)
    except Exception as error:  # whatever an engine says of a request ends that request
        traceback.print_exc()
        wire.send({"out": [[request["id"], [], f"error: {type(error).__name__}: {error}"]]})


def pictures(request: Message) -> list[Any]:
    """The request's images, decoded by PIL, in RGB."""
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB") for each in request["images"]]


def shortened(request: Message) -> list[int]:
    """The prompt's ids with one placeholder for each image, as before it was expanded."""
    ids: list[int] = request["ids"]
    kept, at = list[int](), 0
    for first, count in request["spans"]:
        kept += ids[at : first + 1]
        at = first + count
    return kept + ids[at:]


def fresh(streams: dict[int, int], number: int, tokens: list[int]) -> list[int]:
    """Of all tokens that a request has, those that it had not when last asked; ``streams`` counts."""
    seen = streams.get(number, 0)
    streams[number] = len(tokens)
    return list(tokens[seen:])
