"""A pipeline's program in a process of its own, which is given words and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

from support.checkpoint_files import checkpoint
from support.running_instances import GREEDY, PHOTOS
from trinity.request import Request
from trinity.testing.oracle import Oracle

REQUEST_ERRORS = {"MigrationError", "StageError", "Overloaded", "RequestError", "PeerLost"}
ANSWER_S, END_S = 360.0, 120.0


class AskedProgram:
    """Such a program, if it has been begun."""

    program: subprocess.Popen[bytes] | None = None

    def begin(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe, known = subprocess.PIPE, {**os.environ, **environment}
        self.program = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=known, start_new_session=True)

    def ask(self, word: str, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Give the program a word; return what it says."""
        assert self.program is not None
        told = cast(IO[bytes], self.program.stdin)
        told.write(f"{word}\n".encode())
        told.flush()
        heard = cast(IO[bytes], self.program.stdout)
        ready, _, _ = select.select([heard], [], [], timeout_s)
        assert ready, f"the program said nothing for {timeout_s} s"
        answer: dict[str, Any] = json.loads(heard.readline())
        return answer

    def end(self) -> int:
        """Have the program close its pipeline; return its exit code."""
        assert self.program is not None
        cast(IO[bytes], self.program.stdin).close()
        try:
            return self.program.wait(END_S)
        finally:
            cast(IO[bytes], self.program.stdout).close()

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.program is not None and self.program.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.program.pid, signal.SIGKILL)
            self.program.wait()
            for each in (self.program.stdin, self.program.stdout):
                cast(IO[bytes], each).close()


def make_wanted() -> list[int]:
    """What ``generate()`` answers to the program's request."""
    asked = Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=24, sampling=GREEDY)
    return Oracle(checkpoint("llava")).generate(asked)


def check_told(told: dict[str, Any], wanted: list[int]) -> int:
    """Every answer is exact, every error one of a request's; return the number of answers."""
    assert not told["problem"], told
    assert [tokens for tokens, _ in told["answers"]] in ([], [wanted])
    assert set(told["errors"]) <= REQUEST_ERRORS, Counter(told["errors"])
    return sum(count for _, count in told["answers"])
