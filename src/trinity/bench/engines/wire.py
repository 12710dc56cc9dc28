"""The protocol between a measured server and its client: one JSON object a line over a socket. Standard library only.

To the server, for each request: ``{"id", "text", "ids", "spans", "images", "tokens"}``. These are the prompt as text
and as token ids, (first, count) of each image's visual tokens among the ids, JPEGs in base64, and the number of tokens
to generate. To the client: first a description of the server, then ``{"out": [[id, tokens, end], ...]}`` for each step.
``end`` is empty while the request runs, "length" when it is complete, and "error: ..." when it failed.
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

WireMessage = dict[str, Any]
TokenUpdate = tuple[int, list[int], str]


class SteppedEngine(Protocol):
    """An engine that takes requests and is stepped, all on one thread. Where ``add`` raises, that request fails."""

    about: WireMessage

    @property
    def busy(self) -> bool: ...

    def add(self, request: WireMessage) -> None: ...

    def step(self) -> Iterable[TokenUpdate]: ...


class ServerWire:
    """The server's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")

    def send(self, message: WireMessage) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[WireMessage]:
        """Yield requests until the client hangs up."""
        for line in self._file:
            yield json.loads(line)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def serve_engine(engine: SteppedEngine, wire: ServerWire) -> None:
    """Describe the engine, then add requests as they come and step, until the client hangs up."""
    asked: queue.SimpleQueue[WireMessage | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(wire, asked), daemon=True).start()
    wire.send(describe_server(engine.about))
    while True:
        while not engine.busy or not asked.empty():
            request = asked.get()
            if request is None:
                return
            _add(engine, wire, request)
        if out := list(engine.step()):
            wire.send({"out": out})


def describe_server(engine: WireMessage) -> WireMessage:
    """Describe the server's process and its engine: the first message of the protocol."""
    omp = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    return {"python": sys.version.split()[0], "process": os.getpid(), "omp": omp, **engine}


def _read(wire: ServerWire, asked: queue.SimpleQueue[WireMessage | None]) -> None:
    try:
        for message in wire.messages():
            asked.put(message)
    finally:
        asked.put(None)


def _add(engine: SteppedEngine, wire: ServerWire, request: WireMessage) -> None:
    try:
        engine.add(request)
    except Exception as error:  # an engine that refuses a request fails that request alone
        traceback.print_exc()
        wire.send({"out": [[request["id"], [], f"error: {type(error).__name__}: {error}"]]})


def decode_images(request: WireMessage) -> list[Any]:
    """Decode the request's images with PIL, in RGB."""
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB") for each in request["images"]]


def collapse_placeholders(request: WireMessage) -> list[int]:
    """Undo the expansion of image placeholders: the prompt's ids with one placeholder for each image."""
    ids: list[int] = request["ids"]
    kept, at = list[int](), 0
    for first, count in request["spans"]:
        kept += ids[at : first + 1]
        at = first + count
    return kept + ids[at:]


def take_new_tokens(streams: dict[int, int], number: int, tokens: list[int]) -> list[int]:
    """Return the tokens that a request has gained since the last call; ``streams`` keeps the count by request."""
    seen = streams.get(number, 0)
    streams[number] = len(tokens)
    return list(tokens[seen:])
