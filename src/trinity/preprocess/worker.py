"""A preprocessing process's own program: answers one request after another, until its parent lets go of it.

``WorkerProcess`` starts it with the number of an open socket. Through that comes ``(model_dir, limits, ignore)`` once,
and ``(request id, pickled Request)`` each time after; every answer is what came of it, or the error.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from trinity.errors import ConfigError, RequestError, describe_error
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor

PICKLE = 5  # protocol
WorkerAnswer = tuple[str, Any]  # "done" and what came of it, or the name of an error and its arguments


def main(number: int) -> None:
    """Serve the socket of this number."""
    connection = Connection(number)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, asked), name="trinity-worker-reader", daemon=True).start()
    processor = _load(connection, *pickle.loads(asked.get()))
    while processor is not None:
        _send(connection, _process(processor, asked.get()))


def _listen(connection: Connection, asked: queue.SimpleQueue[bytes]) -> None:
    """Take in requests. Once the parent is gone this process ends, whatever it is at."""
    try:
        while True:
            asked.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _load(connection: Connection, model_dir: str, limits: Any, ignore: Any) -> RequestProcessor | None:
    try:
        processor = RequestProcessor(model_dir, limits=limits, ignore_generation_config=ignore)
    except BaseException as error:
        _send(connection, (ConfigError.__name__, (describe_error(error),)))
        return None
    _send(connection, ("done", None))
    return processor


def _process(processor: RequestProcessor, packed: bytes) -> WorkerAnswer:
    name = ""
    try:
        name, asked = pickle.loads(packed)
        request = pickle.loads(asked)
        return "done", plain_inputs(processor.process(request))
    except RequestError as error:
        return type(error).__name__, (str(error), error.request_id)
    except Exception as error:  # an object of a class that only the parent has
        return RequestError.__name__, (f"the request cannot be read in its process ({describe_error(error)})", name)


def plain_inputs(processed: ProcessedRequest) -> tuple[ProcessedRequest, list[dict[str, Any]]]:
    """Take the encoder's inputs out, as numpy arrays where numpy knows the type: those travel without a copy."""
    inputs = [{name: _plain(value) for name, value in each.items()} for each in processed.inputs]
    return ProcessedRequest(processed.work, (), processed.clipped, processed.emulated, processed.stop), inputs


def _plain(value: Any) -> Any:
    try:
        return value.numpy()
    except (AttributeError, TypeError):  # no tensor, or of a type such as bfloat16
        return value


def _send(connection: Connection, answer: WorkerAnswer) -> None:
    connection.send_bytes(pickle.dumps(answer, PICKLE))


if __name__ == "__main__":
    main(int(sys.argv[1]))
