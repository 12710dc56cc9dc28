"""The server that a document tells its readers to start, for the blocks of python that ask it."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

ADDRESS = "http://127.0.0.1:8000"


@contextlib.contextmanager
def serving_as_told(document: Path, program: Sequence[str], **settings: str) -> Iterator[str]:
    """Run the one ``trinity serve`` of a document by ``program``, on a free port; yields its address once it serves.

    ``settings``: environment variables instead of this process's own.
    """
    (told,) = re.findall(r"^trinity (serve .*--port )8000$", document.read_text(encoding="utf-8"), re.MULTILINE)
    command = [*program, *told.split(), "0"]
    with subprocess.Popen(command, env=settings or None, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            first, second = run.stdout.readline(), run.stdout.readline()
            assert second.startswith("serving "), (first, second)
            yield first.split(" at ")[1].split("/v1")[0]
        finally:
            run.terminate()
            assert run.wait(60) == 0
