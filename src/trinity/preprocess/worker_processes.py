"""Preprocessing in processes that can be killed: an image or a template that never ends harms its own request alone."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from trinity import errors
from trinity.errors import ClosedError, ConfigError, RequestError
from trinity.preprocess.media_limits import MediaBudget, MediaLimits, MediaProblem, TooManyTokens, advise_less
from trinity.preprocess.own_processor import GivenProcessor
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.worker import PICKLE, WorkerAnswer, WorkerSetup
from trinity.request import Media, Request, check_request

START_S = 120.0  # to import, and to load tokenizer and processor
LEFT_S = 1.0  # that a request may still have once its caller has left: less than a new process takes to start


class WorkerEnded(Exception):
    """The process has ended, or was killed because its time was up: ``late``. ``taken``: it had begun its request."""

    def __init__(self, late: bool, code: int, taken: bool = False) -> None:
        super().__init__(f"exit code {code}")
        self.late, self.code, self.taken = late, code, taken


class _Question:
    """Something that a process is asked. ``left``: nobody waits for the answer any more."""

    def __init__(self, name: str) -> None:
        self.name, self.left = name, False


class WorkerProcess:
    """One process that preprocesses requests. For one thread at a time; ``stop`` and ``hurry`` may come from any.

    ``setup``: what it loads. It ends with this process, whatever it is at, also if that has forked others. (On a system
    without SIGIO for pipes one that holds the interpreter's lock ends only once it lets go of that.)
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = pickle.dumps(setup, PICKLE)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline: int | None = None  # end of a pipe: once it is closed, the kernel ends the process
        self._question: _Question | None = None
        self._late = self._stopped = False
        self._lock = threading.Lock()  # of what may come in between
        _made.add(self)

    @property
    def running(self) -> bool:
        """True while the process is there."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self) -> None:
        """Start it, if it does not run, and have it load. Raises ``ConfigError`` if that fails, or ``WorkerEnded``."""
        if self.running:
            return
        self.end()
        self._spawn()
        name, given = self.ask(_Question("setup"), self._setup, START_S)
        if name != "done":
            raise ConfigError(f"a preprocessing process could not load the model: {given[0]}")

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        numbers = [theirs.fileno(), watched]
        try:
            with ours, theirs, self._lock:
                if self._stopped:
                    raise WorkerEnded(False, 0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trinity.preprocess.worker", *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=quiet,
                    pass_fds=numbers,
                    start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends it
                )
                self._connection, self._lifeline = Connection(ours.detach()), lifeline
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(watched)

    def ask(self, question: _Question, content: bytes, seconds: float) -> WorkerAnswer:
        """Send a question and return its answer. Raises ``WorkerEnded`` if none comes within ``seconds``."""
        with self._lock:
            connection, self._question, self._late = self._connection, question, False
            seconds = min(seconds, LEFT_S) if question.left else seconds
        assert connection is not None, "start() comes first"
        timer = self._set_timer(question, seconds)
        name, taken = question.name.encode(errors="surrogatepass"), False
        try:
            connection.send_bytes(name)
            connection.send_bytes(content)
            taken = connection.recv_bytes() == name
            told, *answer = pickle.loads(connection.recv_bytes())
            if not taken or told != question.name:
                raise OSError("its answer is to another question")
        except BaseException as error:  # a MemoryError too: what is left of an answer would be taken for the next one
            code = self.end()
            if isinstance(error, (EOFError, OSError)):
                raise WorkerEnded(self._late, code, taken) from error
            raise
        finally:
            with self._lock:
                self._question = None
            timer.cancel()
            timer.join()
        if self._late:  # killed as it answered
            self.end()
        return answer[0], answer[1]

    def hurry(self, question: _Question) -> None:
        """Kill the process soon if it is still at this question then: nobody waits for the answer."""
        with self._lock:
            if self._question is question:
                self._set_timer(question, LEFT_S)

    def _set_timer(self, question: _Question, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._expire, (question,))
        timer.name, timer.daemon = "trinity-worker-time", True
        timer.start()
        return timer

    def _expire(self, question: _Question) -> None:
        with self._lock:
            if self._question is question:
                self._late = True
                self._kill()

    def stop(self) -> None:
        """Kill the process for good; a question that waits is answered by ``WorkerEnded``."""
        with self._lock:
            self._stopped = True
            self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> int:
        """Kill the process, wait for its end and return its exit code, 0 if there was none. May be called twice."""
        with self._lock:
            process, self._process = self._process, None
            self.let_go()
        if process is None:
            return 0
        process.kill()
        return process.wait()

    def let_go(self) -> None:
        """Close this process's ends of socket and pipe."""
        connection, lifeline, self._connection, self._lifeline = self._connection, self._lifeline, None, None
        with suppress(OSError):
            if connection is not None:
                connection.close()
        with suppress(OSError):
            if lifeline is not None:
                os.close(lifeline)


_made: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close what a program's fork has copied: the workers of a parent that is gone would take it for alive."""
    for each in list(_made):
        each.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class KillableProcessor(RequestProcessor):
    """A ``RequestProcessor`` whose requests are processed by ``limits.processes`` processes of their own.

    A process that needs longer than ``preprocess_timeout_s`` for a request, or ends at it, fails that request alone. So
    does one that is still at a request ``LEFT_S`` after its caller has left. The next one is started at once.

    URLs are fetched here, on the event loop. PIL images are decoded here, once their size is accepted: they are objects
    of this process, which others may share.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        limits: MediaLimits,
        ignore_generation_config: Collection[str] | bool = (),
        strips: int = 1,
        processor: GivenProcessor | None = None,
    ) -> None:
        super().__init__(
            model_dir,
            limits=limits,
            threads=limits.processes,
            ignore_generation_config=ignore_generation_config,
            strips=strips,
            processor=processor,
        )
        setup = WorkerSetup.of(self, str(Path(model_dir).absolute()), ignore_generation_config, processor)
        self._workers = [WorkerProcess(setup) for _ in range(limits.processes)]
        self._restarts = ThreadPoolExecutor(limits.processes, thread_name_prefix="trinity-worker-start")
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for each in self._workers:
            self._idle.put(each)
        try:
            list(self._restarts.map(WorkerProcess.start, self._workers))
        except WorkerEnded as error:
            self.close()
            raise ConfigError(f"a preprocessing process ended as it loaded ({error}); see its output") from error
        except BaseException:
            self.close()
            raise

    async def aprocess(self, request: Request) -> ProcessedRequest:
        """Process a request in one of the processes. Raises ``ClosedError``, and the errors of ``process``."""
        checked = self._admit(await self.sampling_door.admit(check_request(request), self._stop_ids, self.defaults))
        question = _Question(checked.request_id)
        fetched = await self._fetch(checked, checked.all_media())
        checked = msgspec.structs.replace(checked, images=(), media=fetched)
        try:
            return await self._run(checked.request_id, self._ask, checked, question)
        except asyncio.CancelledError:
            question.left = True
            for each in self._workers:
                each.hurry(question)
            raise

    def close(self) -> None:
        """Kill the processes, and with them what they are at."""
        self._closed = True
        for each in self._workers:
            each.stop()
        super().close()
        self._restarts.shutdown(wait=True, cancel_futures=True)
        for each in self._workers:
            each.end()

    def _ask(self, request: Request, question: _Question) -> ProcessedRequest:
        content = self._pack(request)
        try:
            name, given = self._ask_worker(request, question, content)
        except WorkerEnded as error:
            raise self._explain(error, request) from error
        except ConfigError as error:
            raise RequestError(str(error), request.request_id) from error
        if name != "done":
            raise getattr(errors, name)(*given)
        processed: ProcessedRequest = given[0]
        inputs: list[dict[str, Any]] = given[1]
        return msgspec.structs.replace(processed, inputs=tuple(map(_tensors, inputs)))

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

    def _ask_worker(self, request: Request, question: _Question, content: bytes) -> WorkerAnswer:
        """Ask a worker, and one more if the first had died before the request reached it."""
        for last in (False, True):
            worker = self._idle.get()
            try:
                worker.start()
                return worker.ask(question, content, self.limits.preprocess_timeout_s)
            except WorkerEnded as error:
                if error.taken or error.late or self._closed or last:
                    raise
            finally:
                self._give_back(worker)
        raise AssertionError("the last attempt returns or raises")

    def _give_back(self, worker: WorkerProcess) -> None:
        if worker.running or self._closed:
            self._idle.put(worker)
        else:
            self._restarts.submit(self._restart, worker)

    def _restart(self, worker: WorkerProcess) -> None:
        with suppress(Exception):  # the next request tries again, and says what is wrong
            worker.start()
        self._idle.put(worker)

    def _explain(self, error: WorkerEnded, request: Request) -> Exception:
        if self._closed:
            return ClosedError("the request processor was closed before it had processed this request")
        if error.late:
            text = f"preprocessing took longer than preprocess_timeout_s ({self.limits.preprocess_timeout_s:g} s)"
            less = advise_less([each.kind for each in request.all_media()])
            return RequestError(f"{text}; give {less}", request.request_id)
        text = f"the process that preprocessed the request ended at it ({error}); see its output"
        return RequestError(text, request.request_id)


def _tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in inputs.items()}
