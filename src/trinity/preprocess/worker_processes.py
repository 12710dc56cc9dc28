"""Preprocessing in processes that can be killed: an image or a template that never ends harms its own request alone."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
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
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.worker import PICKLE
from trinity.request import Request, check_request

START_S = 120.0  # to import, and to load tokenizer and processor


class WorkerEnded(Exception):
    """The process has ended, or was killed because its time was up: ``late``."""

    def __init__(self, late: bool, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.late, self.code = late, code


class WorkerProcess:
    """One process that preprocesses requests. For one thread at a time; ``stop`` may come from any.

    ``setup``: the arguments of its ``RequestProcessor``.
    """

    def __init__(self, setup: tuple[str, MediaLimits, Collection[str] | bool]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._late = self._stopped = False
        self._lock = threading.Lock()  # of what stop() may come in between

    def start(self) -> None:
        """Start it, if it does not run, and have it load. Raises ``ConfigError`` if that fails, or ``WorkerEnded``."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", "trinity.preprocess.worker", str(theirs.fileno())]
            quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            with self._lock:
                if self._stopped:
                    raise WorkerEnded(False, 0)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=quiet,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C is for the parent, which ends it
                )
            self._connection = Connection(ours.detach())
        name, given = self.ask(self._setup, START_S)
        if name != "done":
            raise ConfigError(f"a preprocessing process could not load the model: {given[0]}")

    def ask(self, question: object, seconds: float) -> tuple[str, Any]:
        """Send a question and return its answer. Raises ``WorkerEnded`` if none comes within ``seconds``."""
        process, connection = self._process, self._connection
        assert process is not None, "start() comes first"
        assert connection is not None
        packed, self._late = pickle.dumps(question, PICKLE), False
        timer = threading.Timer(seconds, self._expire)
        timer.name, timer.daemon = "trinity-worker-time", True
        timer.start()
        try:
            connection.send_bytes(packed)
            answer: tuple[str, Any] = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            process.kill()
            raise WorkerEnded(self._late, process.wait()) from error
        finally:
            timer.cancel()
            timer.join()
        return answer

    def _expire(self) -> None:
        self._late = True
        self._kill()

    def stop(self) -> None:
        """Kill the process for good; a question that waits is answered by ``WorkerEnded``."""
        with self._lock:
            self._stopped = True
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for its end. May be called twice."""
        self._kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
        self._process = self._connection = None


class KillableProcessor(RequestProcessor):
    """A ``RequestProcessor`` whose requests are processed by ``limits.processes`` processes of their own.

    A process that needs longer than ``preprocess_timeout_s`` for a request (and ``url_timeout_s`` for each of its
    media where URLs are allowed), or ends at it, fails that request alone; the next request gets a new one.
    """

    def __init__(
        self, model_dir: str | Path, *, limits: MediaLimits, ignore_generation_config: Collection[str] | bool = ()
    ) -> None:
        super().__init__(
            model_dir, limits=limits, threads=limits.processes, ignore_generation_config=ignore_generation_config
        )
        setup = (str(model_dir), limits, ignore_generation_config)
        self._workers = [WorkerProcess(setup) for _ in range(limits.processes)]
        self._idle: SimpleQueue[WorkerProcess] = SimpleQueue()
        for each in self._workers:
            self._idle.put(each)
        try:
            with ThreadPoolExecutor(limits.processes) as starting:
                list(starting.map(WorkerProcess.start, self._workers))
        except WorkerEnded as error:
            self.close()
            raise ConfigError(f"a preprocessing process ended as it loaded ({error}); see its output") from error
        except BaseException:
            self.close()
            raise

    async def aprocess(self, request: Request) -> ProcessedRequest:
        """Process a request in one of the processes. Raises ``ClosedError``, and the errors of ``process``."""
        checked = check_request(request)
        return await self._run(checked.request_id, self._ask, checked)

    def close(self) -> None:
        """Kill the processes, and with them what they are at."""
        self._closed = True
        for each in self._workers:
            each.stop()
        super().close()
        for each in self._workers:
            each.end()

    def _ask(self, request: Request) -> ProcessedRequest:
        worker = self._idle.get()
        try:
            worker.start()
            name, given = worker.ask((request.request_id, pickle.dumps(request, PICKLE)), self._allowed_s(request))
        except WorkerEnded as error:
            raise self._explain(error, request) from error
        except ConfigError as error:
            raise RequestError(str(error), request.request_id) from error
        finally:
            self._idle.put(worker)
        if name != "done":
            raise getattr(errors, name)(*given)
        processed: ProcessedRequest = given[0]
        inputs: list[dict[str, Any]] = given[1]
        return msgspec.structs.replace(processed, inputs=tuple(map(_tensors, inputs)))

    def _allowed_s(self, request: Request) -> float:
        fetched = len(request.all_media()) if self.limits.allow_urls else 0
        return self.limits.preprocess_timeout_s + fetched * self.limits.url_timeout_s

    def _explain(self, error: WorkerEnded, request: Request) -> Exception:
        if self._closed:
            return ClosedError("the request processor was closed before it had processed this request")
        if error.late:
            text = f"preprocessing took longer than preprocess_timeout_s ({self.limits.preprocess_timeout_s:g} s)"
            return RequestError(f"{text}; give fewer or smaller images", request.request_id)
        text = f"the process that preprocessed the request ended at it ({error}); see its output"
        return RequestError(text, request.request_id)


def _tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch

    return {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in inputs.items()}
