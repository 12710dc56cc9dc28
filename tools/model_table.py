"""The table of models: every causal, image-text and multimodal type of transformers, and whether it serves.

``python tools/model_table.py`` (``make models``) builds a tiny checkpoint of each type in a process of its own, bounded
in memory and time, runs what loading it runs, and writes a page below build. Types as arguments print their rows alone.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity.testing.type_trials import CHECKED, LISTED, NOT_SERVED, Row, count_processors, list_work, shorten

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "build" / "models").with_suffix(".md")
MOST_SECONDS, MOST_BYTES = 300, 16 << 30  # of one type
_HEAD = """# Models
Written by `make models`, which builds a tiny checkpoint of every causal, image-text and multimodal type of
transformers {version} and loads it as a pipeline does. *Listed*: the tests compare it with `generate()`. *By
self-check*: it proves itself as it is loaded ([0006](docs/decisions/0006-what-a-model-must-prove.md),
[0099](docs/decisions/0099-a-proof-for-models-that-nobody-listed.md)). `trinity check MODEL` does so for a checkpoint of
yours. A refusal names the part. One that says "tiny checkpoint" is of the table itself: no small model of that type
could be made here, and yours may serve.

{processors} of {media} multimodal types have an image processor that loads without torchvision.
"""


def run_bounded(work: Callable[[str, Path], Row], model_type: str) -> Row:
    """Run ``work`` in a child with bounds on its memory and time."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "row"
        child = os.fork()
        if child == 0:
            _answer(work, model_type, Path(scratch) / "model", answer)
        ended = _wait(child)
        if answer.is_file():
            return msgspec.json.decode(answer.read_bytes(), type=Row)
        return Row(model_type, NOT_SERVED, f"tiny checkpoint: its process ended with {ended} within {MOST_SECONDS} s")


def _answer(work: Callable[[str, Path], Row], model_type: str, folder: Path, answer: Path) -> None:
    """Write the row of a type and end this process."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        try:
            row = work(model_type, folder)
        except Exception as error:
            row = Row(model_type, NOT_SERVED, shorten(f"{type(error).__name__}: {error}"))
        answer.write_bytes(msgspec.json.encode(row))
    finally:
        os._exit(0)


def _wait(child: int) -> int:
    """Wait for a child, kill it when its time is up; its status."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def write_page(rows: Sequence[Row], media: int, processors: int, version: str) -> str:
    """Write the page: head counts, then the rows of multimodal and of causal types."""
    parts = [_HEAD.format(version=version, processors=processors, media=media)]
    for title, part in (("Multimodal types", rows[:media]), ("Text types", rows[media:])):
        counts = Counter(row.outcome for row in part)
        serving = counts[LISTED] + counts[CHECKED]
        parts.append(
            f"\n## {title}\n{serving} of {len(part)} serve: {counts[LISTED]} listed, {counts[CHECKED]} by self-check; "
            f"{counts[NOT_SERVED]} are refused.\n\n| type | | |\n|---|---|---|\n"
        )
        parts += [f"| {row.model_type} | {row.outcome} | {row.said} |\n" for row in part]
    return "".join(parts)


def read_rows(page: str) -> Iterator[Row]:
    """Read the rows of a page back."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[1] in (LISTED, CHECKED, NOT_SERVED):
            yield Row(cells[0], cells[1], cells[2].replace("\0", "\\|"))


def main(arguments: Sequence[str]) -> int:
    """Try all types and write the page, or print the rows of those named."""
    os.environ["TRINITY_CACHE"] = "off"
    import torch
    import transformers

    torch.set_num_threads(1)
    untyped: Any = transformers
    untyped.utils.logging.set_verbosity_error()
    work = list_work()
    chosen = [(name, tried) for name, tried in work if not arguments or name in arguments]
    rows = []
    for name, tried in chosen:
        rows.append(run_bounded(tried, name))
        print(f"{name}: {rows[-1].outcome}: {rows[-1].said}", flush=True)
    if not arguments:
        processors, media = count_processors()
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(write_page(rows, media, processors, transformers.__version__), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
