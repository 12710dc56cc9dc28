"""A preprocessing process's own program: answers one request after another, until its parent lets go of it.

``WorkerProcess`` starts it with the numbers of an open socket and of the end of a pipe. Through the socket come pairs
of a name and its content: a ``WorkerSetup`` first, then a pickled ``Request`` each time. The name is sent back at once,
as the sign that the content has come, and then the answer: (name, "done" or the name of an error, what came of it).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import queue
import select
import signal
import sys
import threading
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from trinity.errors import ConfigError, RequestError, describe_error
from trinity.preprocess import loader, model_types
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.own_processor import GivenProcessor, pack_processor
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor

PICKLE = 5  # protocol
WorkerAnswer = tuple[str, Any]  # "done" and what came of it, or the name of an error and its arguments


class WorkerSetup(msgspec.Struct, frozen=True):
    """Everything that a process needs to make of a request what its parent would.

    - ``model_dir``, ``limits``, ``ignore``: arguments of its ``RequestProcessor``.
    - ``model_type``: the model's; ``markup`` is its entry in ``IMAGE_TEXT`` (None: it has none), and ``registered``
      whether the parent's program registered an adapter for it.
    - ``fingerprint``: of the parent's own processor.
    - ``strips``: its argument of that name. ``own``: its ``processor``, pickled.
    """

    model_dir: str
    limits: MediaLimits
    ignore: Collection[str] | bool
    model_type: str
    markup: loader.ImageText | None
    registered: bool
    fingerprint: str
    strips: int
    own: bytes

    @staticmethod
    def of(
        processor: RequestProcessor, model_dir: str, ignore: Collection[str] | bool, own: GivenProcessor | None = None
    ) -> WorkerSetup:
        """Describe the parent's processor."""
        kind = processor.model_type
        markup, registered = loader.IMAGE_TEXT.get(kind), kind in model_types.registered
        rest = (processor_fingerprint(processor), processor.strips, pack_processor(own))
        return WorkerSetup(model_dir, processor.limits, ignore, kind, markup, registered, *rest)


def processor_fingerprint(processor: RequestProcessor) -> str:
    """Hash what decides the tokens, the pixels and the end of a request beside the request itself."""
    loaded = processor._loaded
    templates = [getattr(each, "chat_template", None) for each in (loaded.processor, loaded.tokenizer)]
    readers = sorted((name, each.fingerprint) for name, each in processor._readers.items())
    parts = [
        (type(loaded.config).__name__, type(loaded.tokenizer).__name__, type(loaded.processor).__name__),
        (processor.model_type, processor.context_length, processor.vocabulary, readers),
        (sorted(loaded.eos_ids), sorted(loaded.media_token_ids), sorted(loaded.placeholders.items()), loaded.atomic),
        templates,
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def main(number: int, lifeline: int) -> None:
    """Serve the socket of this number, until the other end of the pipe ``lifeline`` is closed."""
    _end_with_parent(lifeline)
    connection = Connection(number)
    asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, asked), name="trinity-worker-reader", daemon=True).start()
    name, setup = _take(connection, asked)
    processor = _load(connection, name, pickle.loads(setup))
    while processor is not None:
        name, packed = _take(connection, asked)
        _send(connection, name, _process(processor, name, packed))


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process by SIGIO once no parent holds the pipe any more.

    A thread could not: foreign code such as a template's power of large numbers may hold the interpreter for hours.
    """
    try:
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):  # a system without them: the reading thread is left
        return
    if select.select([lifeline], [], [], 0)[0]:  # closed before the kernel was asked
        os._exit(0)


def _listen(connection: Connection, asked: queue.SimpleQueue[bytes]) -> None:
    """Take in requests. Once the parent is gone this process ends, whatever it is at."""
    try:
        while True:
            asked.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _take(connection: Connection, asked: queue.SimpleQueue[bytes]) -> tuple[str, bytes]:
    name, content = asked.get(), asked.get()
    connection.send_bytes(name)
    return name.decode(), content


def _load(connection: Connection, name: str, setup: WorkerSetup) -> RequestProcessor | None:
    try:
        if setup.registered:
            model_types.registered.add(setup.model_type)
        if setup.markup is not None:
            loader.IMAGE_TEXT[setup.model_type] = setup.markup
        else:
            loader.IMAGE_TEXT.pop(setup.model_type, None)
        given = {"limits": setup.limits, "ignore_generation_config": setup.ignore, "strips": setup.strips}
        given["processor"] = pickle.loads(setup.own)
        processor = RequestProcessor(setup.model_dir, **given)  # type: ignore[arg-type]
        _compare(processor, setup)
    except BaseException as error:
        _send(connection, name, (ConfigError.__name__, (describe_error(error),)))
        return None
    _send(connection, name, ("done", None))
    return processor


def _compare(processor: RequestProcessor, setup: WorkerSetup) -> None:
    if processor_fingerprint(processor) != setup.fingerprint:
        raise ConfigError(
            "it loads another tokenizer or processor than the program that started it, which has registered or changed "
            "something of transformers: preprocess on threads (MediaLimits(processes=0)), or put it into a package"
        )


def _process(processor: RequestProcessor, name: str, packed: bytes) -> WorkerAnswer:
    try:
        return "done", plain_inputs(processor.process(pickle.loads(packed)))
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


def _send(connection: Connection, name: str, answer: WorkerAnswer) -> None:
    connection.send_bytes(pickle.dumps((name, *answer), PICKLE))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
