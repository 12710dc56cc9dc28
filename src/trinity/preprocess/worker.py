"""Program of the processes that prepare requests: one loads a model, and forks the workers that do the work.

``WorkerOrigin`` starts the first with the numbers of two descriptors: a socket of orders, and a pipe that the parent
holds open (the lifeline). A worker gets both kinds from an order. On its own socket come a request's name and content;
it sends what the request's media take and, once it may go on, the answer.
Every process here has one thread, and ends with the parent whatever it is at.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from PIL import Image

from trinity.config_classes import pick_fields
from trinity.errors import ConfigError, RequestError, describe_error
from trinity.errors.parent_process import has_holder_ended, name_process
from trinity.preprocess.checkpoint import model_types
from trinity.preprocess.checkpoint.own_processor import pack_processor
from trinity.preprocess.media.media_markup import IMAGE_TEXT, ImageText
from trinity.preprocess.media_limits import MediaCost, MediaLimits, unit_s
from trinity.preprocess.processor import ProcessedRequest, ProcessorConfig, RequestProcessor
from trinity.request import Request

PICKLE = 5  # protocol
ORDER = struct.Struct("<ii")  # FORK and the niceness of the worker, or REAP and its process number
REPLY = struct.Struct("<i")  # the process number, or how it ended
FORK, REAP = 0, 1
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
OWN_CPU_S, OWN_BYTES, MARGIN = 1.0, 128 << 20, 4  # of a request whose media were priced, and a factor of the prediction
GROWN_BYTES = 64 << 20  # that a worker may keep of a request: one that keeps more makes room for a new one
ROOM, ANSWER = b"room", b"answer"  # the first part of what a worker sends
WorkerAnswer = tuple[str, Any]  # "done" and what came of it, or the name of an error and its arguments


class WorkerSetup(msgspec.Struct, frozen=True):
    """Everything that a process needs to make of a request what its parent would.

    - ``config``: arguments of its ``RequestProcessor``, but for ``processor``; that is ``own``, pickled.
    - ``model_type``: the model's; ``markup`` is its entry in ``IMAGE_TEXT`` (None: it has none), and ``registered``
      whether the parent's program registered an adapter for it.
    - ``fingerprint``: of the parent's own processor.
    """

    config: ProcessorConfig
    own: bytes
    model_type: str
    markup: ImageText | None
    registered: bool
    fingerprint: str

    @staticmethod
    def of(processor: RequestProcessor) -> WorkerSetup:
        """Describe the parent's processor."""
        given, kind = processor.config, processor.model_type
        config = replace(
            given, model_dir=Path(given.model_dir).absolute(), processor=None, threads=ProcessorConfig.threads
        )
        markup, registered = IMAGE_TEXT.get(kind), kind in model_types.registered
        fingerprint = processor_fingerprint(processor)
        return WorkerSetup(config, pack_processor(given.processor), kind, markup, registered, fingerprint)


def processor_fingerprint(processor: RequestProcessor) -> str:
    """Hash what decides the tokens, the pixels and the end of a request beside the request itself."""
    loaded = processor.loaded
    templates = [getattr(each, "chat_template", None) for each in (loaded.processor, loaded.tokenizer)]
    readers = sorted((name, each.fingerprint) for name, each in processor.readers.items())
    parts = [
        (type(loaded.config).__name__, type(loaded.tokenizer).__name__, type(loaded.processor).__name__),
        (processor.model_type, processor.context_length, processor.vocabulary, readers),
        (sorted(loaded.eos_ids), sorted(loaded.media_token_ids), sorted(loaded.placeholders.items()), loaded.atomic),
        templates,
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def send_parts(connection: socket.socket, *parts: Any) -> None:
    """Send a message of several parts, each of them bytes or the raw buffer of an array."""
    views = [memoryview(each) for each in parts]
    connection.sendall(struct.pack(f"<I{len(views)}Q", len(views), *map(len, views)))
    for view in views:
        connection.sendall(view)


def receive_parts(connection: socket.socket) -> list[bytearray]:
    """Receive a message of ``send_parts``. Raises ``EOFError`` at the end, ``OSError``."""
    (count,) = struct.unpack("<I", _receive(connection, 4))
    sizes = struct.unpack(f"<{count}Q", _receive(connection, 8 * count))
    return [_receive(connection, size) for size in sizes]


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other end is closed")
        view = view[count:]
    return data


def pack_answer(answer: Any) -> list[Any]:
    """Pickle an answer; its arrays are parts of their own, which are not copied."""
    arrays: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(answer, PICKLE, buffer_callback=arrays.append)
    return [packed, *(each.raw() for each in arrays)]


def main(orders: int, lifeline: int) -> None:
    """Load a processor as the first message says, answer if that went well, and fork workers."""
    with socket.socket(fileno=orders) as connection:
        end_with_parent(lifeline)
        setup = pickle.loads(receive_parts(connection)[0])
        try:
            processor = _load(setup)
        except BaseException as error:
            send_parts(connection, pickle.dumps((ConfigError.__name__, (describe_error(error),))))
            return
        send_parts(connection, pickle.dumps(("done", None)))
        fork_workers(processor, connection)


def fork_origin(processor: RequestProcessor, orders: int, lifeline: int) -> int:
    """Fork the process that forks workers from this one, which has loaded all. Returns its process number.

    Of the threads of this process that one has none, and of its open files only these two. So other threads may hold
    no lock that preparing needs: only a program that has served nothing yet can promise that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        pid = os.fork()
    if pid:
        return pid
    try:
        _become(orders, lifeline)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends what it started
        os.environ.update(QUIET)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        os.setpgid(0, 0)
        fork_workers(processor, socket.socket(fileno=orders))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become(*kept: int) -> None:
    """Be a forked process of its own: it has these open files and the standard ones, and no signals but by default.

    The last of them is its lifeline. What it has of the process that it was forked from is never collected.
    """
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _keep_files(kept)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what modules print is no output of the program
    end_with_parent(kept[-1])


def _keep_files(kept: Collection[int]) -> None:
    try:
        there = [int(each) for each in os.listdir("/proc/self/fd")]
    except OSError:
        there = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for each in there:
        if each > 2 and each not in kept:
            with suppress(OSError):
                os.close(each)


def fork_workers(processor: RequestProcessor, orders: socket.socket) -> NoReturn:
    """Fork a worker for every order, and say how one ended that is asked for, until the parent lets go."""
    unit_s()
    Image.init()  # else each worker would have to do both for its first request
    gc.collect()
    gc.freeze()
    name_process("prepare")
    while True:
        data, numbers, _, _ = socket.recv_fds(orders, ORDER.size, 2)
        if len(data) < ORDER.size:
            os._exit(0)
        kind, value = ORDER.unpack(data)
        if kind == REAP:
            status = int(signal.SIGKILL)
            with suppress(ChildProcessError):  # of a former process of this kind
                status = os.waitpid(value, 0)[1]
            orders.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if not pid:
            _work(processor, value, numbers)
        for each in numbers:
            os.close(each)
        orders.sendall(REPLY.pack(pid))


def _work(processor: RequestProcessor, niceness: int, numbers: Sequence[int]) -> NoReturn:
    """Be a worker: prepare one request after another."""
    try:
        _become(*numbers)
        os.nice(niceness)
        name_process("media" if niceness else "text")
        limits, begun = processor.limits, data_bytes()
        if begun:
            most, hard = begun + limits.worker_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard),) * 2)
        connection = socket.socket(fileno=numbers[0])
        while True:
            name, *content = receive_parts(connection)
            signal.setitimer(signal.ITIMER_PROF, limits.max_media_cpu_s)  # the end of it is the end of this process
            answer = _answer(processor, connection, name.decode(errors="surrogatepass"), content)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _bound_memory(begun, limits.worker_bytes)  # that of its media was for them
            packed, *arrays = pack_answer(answer)
            kept = data_bytes() - begun - sum(memoryview(each).nbytes for each in arrays)
            send_parts(connection, ANSWER, b"%d" % (kept > GROWN_BYTES) + packed, *arrays)
            del answer, packed, arrays
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def data_bytes() -> int:
    """Count the bytes that this process has of its own, as ``RLIMIT_DATA`` does; 0 where nobody says."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def end_with_parent(lifeline: int) -> None:
    """Have the kernel end this process by SIGIO once no parent holds the pipe any more.

    A thread could not: foreign code such as a template's power of large numbers may hold the interpreter for hours.
    """
    try:
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):  # a system without them: it ends once it reads from its socket
        return
    if has_holder_ended(lifeline):  # closed before the kernel was asked
        os._exit(0)


def _load(setup: WorkerSetup) -> RequestProcessor:
    if setup.registered:
        model_types.registered.add(setup.model_type)
    if setup.markup is not None:
        IMAGE_TEXT[setup.model_type] = setup.markup
    else:
        IMAGE_TEXT.pop(setup.model_type, None)
    config = replace(setup.config, processor=pickle.loads(setup.own))
    processor = RequestProcessor(**pick_fields(ProcessorConfig, config))
    _compare(processor, setup)
    processor.at_once = 1
    return processor


def _compare(processor: RequestProcessor, setup: WorkerSetup) -> None:
    if processor_fingerprint(processor) != setup.fingerprint:
        raise ConfigError(
            "it loads another tokenizer or processor than the program that started it, which has registered or changed "
            "something of transformers: preprocess on threads (MediaLimits(processes=0)), or put it into a package"
        )


def _answer(
    processor: RequestProcessor, connection: socket.socket, name: str, content: list[bytearray]
) -> WorkerAnswer:
    """Prepare the request in ``content``, which is emptied; its media once there is room for what they take."""
    try:
        sent = len(content[0])
        request: Request = pickle.loads(content.pop())
        begin = partial(_begin_media, connection, sent)
        return "done", (name, *plain_inputs(processor.process_priced(request, begin)))
    except BaseException as error:
        return _refuse(error, processor.limits, name)


def _begin_media(connection: socket.socket, sent: int, cost: MediaCost) -> None:
    """Wait for room for a request's media, and bound their CPU time and memory by what was predicted for them.

    ``sent``: bytes of the request as it was sent, which both processes have.
    """
    if cost.bytes:
        send_parts(connection, ROOM, b"%d" % (cost.bytes + 2 * sent))
        receive_parts(connection)  # once it may go on
        _bound_memory(data_bytes(), OWN_BYTES + MARGIN * cost.bytes)
    if cost.cpu_s:
        signal.setitimer(signal.ITIMER_PROF, OWN_CPU_S + MARGIN * cost.cpu_s)


def _bound_memory(begun: int, most: int) -> None:
    """Bound what this process may have beyond ``begun`` bytes."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if begun:
        resource.setrlimit(resource.RLIMIT_DATA, (begun + most if hard < 0 else min(begun + most, hard), hard))


def _refuse(error: BaseException, limits: MediaLimits, name: str) -> WorkerAnswer:
    if _lacks_memory(error):
        return RequestError.__name__, (explain_memory(limits), name)
    if isinstance(error, RequestError):
        return type(error).__name__, (str(error), error.request_id)
    return RequestError.__name__, (f"the request cannot be read in its process ({describe_error(error)})", name)


def _lacks_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's
            return True
        error = error.__cause__ or error.__context__
    return error is not None


def explain_memory(limits: MediaLimits) -> str:
    """Say that a request needed more memory than a process may have for it."""
    most = f"worker_bytes ({limits.worker_bytes}), or than was predicted for its media"
    return f"preprocessing takes more memory than {most}; give less or smaller content"


def plain_inputs(processed: ProcessedRequest) -> tuple[ProcessedRequest, list[dict[str, Any]]]:
    """Take the encoder's inputs out, as numpy arrays where numpy knows the type: those travel without a copy."""
    inputs = [{name: _plain(value) for name, value in each.items()} for each in processed.inputs]
    return ProcessedRequest(processed.work, (), processed.clipped, processed.emulated, processed.stop), inputs


def _plain(value: Any) -> Any:
    try:
        return value.numpy()
    except (AttributeError, TypeError):  # no tensor, or of a type such as bfloat16
        return value


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
