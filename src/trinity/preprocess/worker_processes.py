"""Preparing in processes that can be killed: an image or a template that never ends harms its own request only."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from trinity import errors
from trinity.config_classes import pick_fields, takes
from trinity.errors import ClosedError, ConfigError, RequestError
from trinity.preprocess.media_limits import MediaBudget, MediaLimits, MediaProblem, TooManyTokens, advise_less
from trinity.preprocess.preparation_lanes import LaneVisit, PreparationLane
from trinity.preprocess.processor import ProcessedRequest, ProcessorConfig, RequestProcessor
from trinity.preprocess.worker import (
    ANSWER,
    FORK,
    ORDER,
    PICKLE,
    QUIET,
    REAP,
    REPLY,
    WorkerAnswer,
    WorkerSetup,
    explain_memory,
    fork_origin,
    receive_parts,
    send_parts,
)
from trinity.request import Media, Request

START_S = 120.0  # to import, and to load tokenizer and processor
FORK_S = 60.0  # to fork, the first time behind what the origin does before: hundreds of times what it takes
LEFT_S = 1.0  # that a request may still have once its caller has left: less than a new process takes to start
MEDIA_NICENESS = 15  # of processes that read media: next to one that wants the same processor they get a thirtieth
forks_itself = False
"""True in a program that has served nothing yet as it makes its processor, and holds no lock meanwhile: the process
that forks workers is a fork of it then, which costs nothing. Others start one that imports and loads again."""


class WorkerEnded(Exception):
    """The process has ended, or was killed because its time was up: ``late``."""

    def __init__(self, late: bool, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.late, self.code = late, code

    @property
    def unexplained(self) -> bool:
        """True if no bound of the request ended it: somebody else may have, such as the system that lacked memory."""
        return not self.late and self.code not in (-signal.SIGPROF, -signal.SIGABRT)


class Lifeline:
    """A process of a socket's other end, which lives as long as this holds one end of a pipe. Needs no thread."""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.watched, self._held = os.pipe()
        _made.add(self)

    @property
    def numbers(self) -> list[int]:
        """Descriptors of the process's own ends."""
        return [self.theirs.fileno(), self.watched]

    def hand_over(self) -> None:
        """Close the ends that the process has by now."""
        self.theirs.close()
        if self.watched >= 0:
            os.close(self.watched)
        self.watched = -1

    def let_go(self) -> None:
        """Close this process's ends: the other ends at once. May be called twice."""
        self.hand_over()
        self.connection.close()
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)


_made: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close what a program's fork has copied: the workers of a parent that is gone would take it for alive."""
    for each in list(_made):
        each.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class WorkerOrigin:
    """The process that has loaded a model's processor and forks workers, in a hundredth of a second each.

    ``processor``: this process's own; ``setup``: what the process loads, where it is no fork of this one. One that died
    is started again by the next order. Methods may be called from any thread.
    """

    def __init__(self, processor: RequestProcessor, setup: WorkerSetup) -> None:
        self._processor, self._setup = processor, setup
        self._forks = forks_itself
        self._lock = threading.Lock()
        self._closed = False
        self._line: Lifeline | None = None
        self._kill: Callable[[], None] = _kill_nothing
        self.process = 0  # number

    def fork(self, niceness: int) -> tuple[int, Lifeline]:
        """Fork a worker; start the process if it does not run. Raises ``ConfigError``, ``WorkerEnded``."""
        with self._lock:
            for last in (False, True):
                if self._closed:
                    raise WorkerEnded(False, 0)
                line = Lifeline()  # of this attempt alone: a process that was forked too late may have it
                try:
                    return self._order(ORDER.pack(FORK, niceness), line.numbers), line
                except BaseException as error:
                    line.let_go()
                    if not isinstance(error, OSError):
                        raise
                    if last:
                        raise WorkerEnded(False, -signal.SIGKILL) from error
                finally:
                    line.hand_over()
        raise AssertionError("the last attempt returns or raises")

    def reap(self, process: int) -> int:
        """Wait for a worker that was killed, and return its exit code; that of a kill where nobody knows it."""
        with self._lock, suppress(OSError):
            if self._line is not None:
                return self._order(ORDER.pack(REAP, process), [])
        return -signal.SIGKILL

    def _order(self, order: bytes, numbers: list[int]) -> int:
        """Send an order and receive its reply. Whatever fails ends the process: a late reply would be the next."""
        try:
            line = self._line or self._start()
            socket.send_fds(line.connection, [order], numbers)
            reply = line.connection.recv(REPLY.size, socket.MSG_WAITALL)
            if len(reply) < REPLY.size:
                raise OSError("the process that forks workers has ended")
        except BaseException:
            self._end()
            raise
        return int(REPLY.unpack(reply)[0])

    def _start(self) -> Lifeline:
        line = self._line = Lifeline()
        if self._forks:
            self._forks = False  # once something was served this process is no fresh one any more
            copies = [os.dup(each) for each in line.numbers]  # a fork closes all of ours
            try:
                self.process = fork_origin(self._processor, *copies)
            finally:
                for each in copies:
                    os.close(each)
            self._kill = partial(_kill_child, self.process)
        else:
            command = [sys.executable, "-m", "trinity.preprocess.worker", *map(str, line.numbers)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **QUIET},
                pass_fds=line.numbers,
                process_group=0,  # a terminal's Ctrl-C is for the parent, which ends it; of its session, for niceness
            )
            self.process, self._kill = process.pid, partial(_end_process, process)
            line.hand_over()
            line.connection.settimeout(START_S)
            send_parts(line.connection, pickle.dumps(self._setup, PICKLE))
            try:
                name, given = pickle.loads(receive_parts(line.connection)[0])
            except EOFError as error:
                raise OSError(str(error)) from error
            if name != "done":
                raise ConfigError(f"a preprocessing process could not load the model: {given[0]}")
        line.hand_over()
        line.connection.settimeout(FORK_S)
        return line

    def _end(self) -> None:
        line, kill, self._line, self._kill, self.process = self._line, self._kill, None, _kill_nothing, 0
        if line is not None:
            line.let_go()
        kill()

    def close(self) -> None:
        """Kill the process for good. May be called twice."""
        with self._lock:
            self._closed = True
            self._end()


def _kill_nothing() -> None:
    """There is no process."""


def _kill_child(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(process, 0)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class WorkerProcess:
    """One process that prepares requests, for one thread at a time; ``kill`` may be called from any.

    It ends with this process, whatever it is at, also if that has forked others. (On a system without SIGIO for pipes
    one that holds the interpreter's lock ends only once it lets go of that.)
    """

    def __init__(self, origin: WorkerOrigin, niceness: int, limits: MediaLimits) -> None:
        self._origin, self._niceness, self._limits = origin, niceness, limits
        self._lock = threading.Lock()  # of what may come from other threads
        self._line: Lifeline | None = None
        self._at: object = None  # the request that it has, until it has answered
        self._left_s = 0.0
        self.process = 0  # number

    def start(self) -> None:
        """Have it forked, unless it runs and has no request. Raises ``ConfigError``, ``WorkerEnded``."""
        if self._at is not None:  # nobody waits for its answer
            self.end()
        if self._line is None:
            process, line = self._origin.fork(self._niceness)
            with self._lock:
                self.process, self._line = process, line

    def begin(self, key: _Use, name: str, content: bytes) -> int | WorkerAnswer:
        """Send a request. Returns the bytes that its media take, or the answer.

        Raises ``WorkerEnded``, at once if its caller has left.
        """
        with self._lock:  # from here on ``kill`` finds it at the request; whoever came before that has set ``left``
            if key.left:
                raise WorkerEnded(False, 0)
            self._at = key
        self._left_s = self._limits.preprocess_timeout_s
        return self._exchange(name.encode(errors="surrogatepass"), content)

    def go_on(self) -> WorkerAnswer:
        """Have it prepare the request, for whose media there is room now. Raises ``WorkerEnded``."""
        answer = self._exchange(b"")
        assert not isinstance(answer, int), "it has had its room"
        return answer

    def _exchange(self, *parts: bytes) -> int | WorkerAnswer:
        """Send a message and receive what comes of it, in what is left of the request's time."""
        began = time.monotonic()
        try:
            if self._line is None:
                raise EOFError("it has ended")
            connection = self._line.connection
            connection.settimeout(max(0.001, self._left_s))
            send_parts(connection, *parts)
            kind, packed, *arrays = receive_parts(connection)
            if kind != ANSWER:
                self._left_s -= time.monotonic() - began
                return int(packed)
            grown, (name, given) = packed[:1] == b"1", pickle.loads(memoryview(packed)[1:], buffers=arrays)
        except BaseException as error:  # a MemoryError too: what is left of an answer would be taken for the next one
            code = self.end()
            if isinstance(error, (EOFError, OSError)):
                raise WorkerEnded(isinstance(error, TimeoutError), code) from error
            raise
        with self._lock:
            self._at = None
        if grown:
            self.end()
        return name, given

    def kill(self, key: object = None) -> None:
        """Kill it now, if it is still at the request of this key; None: at any. ``WorkerEnded`` is the answer."""
        with self._lock:
            if self.process > 0 and key in (None, self._at):  # of others the kernel makes a group of processes
                with suppress(ProcessLookupError):
                    os.kill(self.process, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process, wait for its end and return its exit code, 0 if there was none. May be called twice."""
        self.kill()
        with self._lock:
            process, line, self.process, self._line, self._at = self.process, self._line, 0, None, None
        if line is not None:
            line.let_go()
        return self._origin.reap(process) if process else 0


class _Use:
    """The worker that a request has, from its beginning until no thread asks it any more or it waits for room.

    ``left``: nobody waits for the request any more, so that a worker which ends at it is not to begin it again.
    """

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None
        self.left = False


class KillableProcessor(RequestProcessor):
    """A ``RequestProcessor`` that prepares in processes: ``limits.processes`` for media, and as many for texts.

    A process that takes longer than ``preprocess_timeout_s`` for a request, more CPU than was predicted or more
    memory than ``worker_bytes`` fails that request only, and one that ends at it too; one that is still at a request
    ``LEFT_S`` after its caller has left is killed. The next one is forked from a process that has loaded all.

    URLs are fetched here, on the event loop. A PIL image that is not decoded yet is sent as its file; one that the
    program has changed since it was opened (a draft, another frame) is decoded here, once its price is accepted.
    """

    _reads_first = False

    @takes(ProcessorConfig)
    def __init__(self, config: ProcessorConfig, _: Set[str]) -> None:
        limits = config.limits
        super().__init__(**pick_fields(ProcessorConfig, replace(config, threads=limits.processes)))
        self.at_once = 1  # of a request, in its process
        self.origin = WorkerOrigin(self, WorkerSetup.of(self))
        self._workers = {
            lane: [WorkerProcess(self.origin, niceness, limits) for _ in range(limits.processes)]
            for lane, niceness in ((self._text_lane, 0), (self._media_lane, MEDIA_NICENESS))
        }
        self._idle: dict[PreparationLane, SimpleQueue[WorkerProcess]] = {}
        try:
            for lane, workers in self._workers.items():
                self._idle[lane] = SimpleQueue()
                for each in workers:
                    each.start()
                    self._idle[lane].put(each)
        except WorkerEnded as error:
            self.close()
            raise ConfigError(f"a preprocessing process ended as it loaded ({error}); see its output") from error
        except BaseException:
            self.close()
            raise

    async def _prepare(self, request: Request, visit: LaneVisit) -> ProcessedRequest:
        name, use, idle = request.request_id, _Use(), self._idle[visit.lane]
        visit.at_end = partial(self._give_back, use, idle)
        try:
            answer = await self._run(visit, name, self._begin_work, use, idle, request)
            if isinstance(answer, int):
                async with self.room.share(answer, name, visit):
                    answer = await self._run(visit, name, self._go_on, use, idle, request)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(LEFT_S, self._hurry, use)
            raise
        kind, given = answer
        if kind != "done":
            raise getattr(errors, kind, RequestError)(*given)  # a package may have errors of its own
        told, processed, inputs = given  # as ``plain_inputs`` makes them
        if told != name:
            assert use.worker is not None, "it has answered"
            use.worker.kill()
            raise RequestError("the process that prepared the request gave an answer to another one", name)
        made: ProcessedRequest = msgspec.structs.replace(processed, inputs=tuple(map(_tensors, inputs)))
        return made

    def close(self) -> None:
        """Kill the processes, and with them what they are at."""
        self._closed = True
        workers = [each for lane in self._workers.values() for each in lane]
        for each in workers:
            each.kill()
        super().close()
        for each in workers:
            each.end()
        self.origin.close()

    def _begin_work(self, use: _Use, idle: SimpleQueue[WorkerProcess], request: Request) -> int | WorkerAnswer:
        """Send a request to a worker, and once more to the next if that ended for no reason that is known."""
        if not all(isinstance(each.source, (bytes, str, Path)) for each in request.media):
            self.media_cost(request)  # objects that are made plain here
        content = self._pack(request)
        worker = use.worker = idle.get_nowait()  # as many as places of the lane
        for last in (False, True):
            try:
                worker.start()
                return worker.begin(use, request.request_id, content)
            except WorkerEnded as error:
                if not error.unexplained or self._closed or use.left or last:
                    raise self._explain(error, request) from error
            except ConfigError as error:
                raise RequestError(str(error), request.request_id) from error
        raise AssertionError("the last attempt returns or raises")

    def _go_on(self, use: _Use, idle: SimpleQueue[WorkerProcess], request: Request) -> WorkerAnswer:
        if use.worker is None:  # another request has it, or had, since this one had to wait
            begun = self._begin_work(use, idle, request)
            if not isinstance(begun, int):
                return begun
        assert use.worker is not None, "it has begun"
        try:
            try:
                return use.worker.go_on()
            except WorkerEnded as error:
                if not error.unexplained or self._closed or use.left:
                    raise
            use.worker.start()
            begun = use.worker.begin(use, request.request_id, self._pack(request))
            return use.worker.go_on() if isinstance(begun, int) else begun
        except WorkerEnded as error:
            raise self._explain(error, request) from error
        except ConfigError as error:
            raise RequestError(str(error), request.request_id) from error

    @staticmethod
    def _hurry(use: _Use) -> None:
        use.left, worker = True, use.worker  # which a thread may take back at any moment
        if worker is not None:
            worker.kill(use)

    @staticmethod
    def _give_back(use: _Use, idle: SimpleQueue[WorkerProcess]) -> None:
        worker, use.worker = use.worker, None
        if worker is not None:
            worker.kill(use)  # if it is still at it
            idle.put(worker)

    def _pack(self, request: Request) -> bytes:
        """Pickle a request with its media in plain forms. Raises the errors that cost no decoding."""
        media = request.all_media()
        among = Counter(each.kind for each in media)
        plain = [Media(each.kind, self._make_plain(each, among[each.kind])) for each in media]
        return pickle.dumps(msgspec.structs.replace(request, images=(), media=plain), PICKLE)

    def _make_plain(self, item: Media, among: int) -> Any:
        """Make a source plain; one that is refused becomes its error, which the process raises by the item's name."""
        budget = MediaBudget(self.limits, self._prompt_limit(), [item.kind])
        try:
            return self._readers[item.kind].make_plain(item.source, among, budget)
        except (MediaProblem, TooManyTokens) as problem:
            return problem

    def _explain(self, error: WorkerEnded, request: Request) -> Exception:
        limits, name = self.limits, request.request_id
        if self._closed:
            return ClosedError("the request processor was closed before it had processed this request")
        less = advise_less([each.kind for each in request.all_media()])
        if error.late:
            text = f"preprocessing took longer than preprocess_timeout_s ({limits.preprocess_timeout_s:g} s)"
            return RequestError(f"{text}; give {less}", name)
        if error.code == -signal.SIGPROF:
            text = f"preprocessing took more CPU time than max_media_cpu_s ({limits.max_media_cpu_s:g} s) allows"
            return RequestError(f"{text}, or than was predicted for the request's media; give {less}", name)
        if error.code == -signal.SIGABRT:  # as libraries end a process that gives them no memory
            return RequestError(f"{explain_memory(limits)} (the process ended itself at the request)", name)
        text = f"the process that preprocessed the request ended at it ({error}); see its output"
        return RequestError(text, name)


def _tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in inputs.items()}
