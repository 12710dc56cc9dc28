"""The table of models: every causal, image-text and multimodal type of transformers, and whether it serves.

``python tools/model_table.py`` (``make models``) builds a tiny checkpoint of each type in a process of its own, bounded
in memory and time, runs what loading it runs, and writes docs/models.md. Types as arguments print their rows alone.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.any_model.trials import CHECKED, LISTED, NOT_SERVED, Row, count_processors, list_work, shorten

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/models.md"
MOST_SECONDS, MOST_BYTES = 300, 16 << 30  # of one type
_HEAD = """# Models
Written by `make models`, which builds a tiny checkpoint of every causal, image-text and multimodal type of
transformers {version} and loads it as a pipeline does. *Listed*: the tests compare it with `generate()`. *By
self-check*: it proves itself as it is loaded ([0006](docs/decisions/0006-what-a-model-must-prove.md),
[0099](docs/decisions/0099-a-proof-for-models-that-nobody-listed.md)). `trinity check MODEL` does so for a checkpoint of
yours. A refusal names the part. One that says "tiny checkpoint" is of the table itself: no small model of that type
could be made here, and yours may serve. OpenGVLab's own folders of InternVL (`internvl_chat`) are converted to
`internvl` as they are loaded ([0118](docs/decisions/0118-checkpoints-of-another-s-code.md)).

The last column lists the kinds of prompt that serve. A request of another kind is rejected, with the part of the proof
that differed ([0126](docs/decisions/0126-kinds-of-prompt-are-proven-one-by-one.md)); `trinity check MODEL` prints both.
PaliGemma, for example, serves prompts with an image and rejects a text by itself.

These models are also tested as the hub publishes their folders, scaled down with random weights: Qwen2-VL, Qwen2.5-VL,
Qwen3-VL, LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision, SmolVLM2, Idefics3, Gemma 3, PaliGemma 2, InternVL3, InternVL 2 to 3.5
of OpenGVLab, Granite Vision, LFM2-VL, Mistral Small 3.1, Pixtral, Aya Vision and Qwen2-Audio. A folder may lack tensors
on which no token depends, such as the end of a tower that is read before it; others are refused by name.

{processors} of {media} multimodal types have a processor of images or audio that loads without torchvision.
"""


class Trial:
    """A type on trial in a child process, bounded in memory and time."""

    def __init__(self, work: Callable[[str, Path], Row], model_type: str) -> None:
        self.model_type, self._end = model_type, time.monotonic() + MOST_SECONDS
        self._scratch = tempfile.TemporaryDirectory()
        self._answer = Path(self._scratch.name) / "row"
        self._child = os.fork()
        if self._child == 0:
            _answer(work, model_type, Path(self._scratch.name) / "model", self._answer)

    def poll(self) -> Row | None:
        """Return the row if the child has ended, by itself or because its time was up."""
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended:
            if time.monotonic() < self._end:
                return None
            os.kill(self._child, signal.SIGKILL)
            status = os.waitpid(self._child, 0)[1]
        try:
            return msgspec.json.decode(self._answer.read_bytes(), type=Row)
        except FileNotFoundError:
            said = f"tiny checkpoint: its process ended with {status} within {MOST_SECONDS} s"
            return Row(self.model_type, NOT_SERVED, said)
        finally:
            self._scratch.cleanup()


def run_bounded(work: Sequence[tuple[str, Callable[[str, Path], Row]]], at_once: int = 1) -> list[Row]:
    """Try types, ``at_once`` at a time, and print each row as it is found; rows in the order of ``work``."""
    left, running, rows = list(reversed(work)), list[Trial](), dict[str, Row]()
    while left or running:
        while left and len(running) < at_once:
            name, tried = left.pop()
            running.append(Trial(tried, name))
        for trial in list(running):
            if (row := trial.poll()) is not None:
                running.remove(trial)
                rows[row.model_type] = row
                print(f"{row.model_type}: {row.outcome}: {row.said}", flush=True)
        time.sleep(0.02)
    return [rows[name] for name, _ in work]


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
        answer.with_suffix(".part").write_bytes(msgspec.json.encode(row))
        answer.with_suffix(".part").rename(answer)
    finally:
        os._exit(0)


def write_page(rows: Sequence[Row], media: int, processors: int, version: str) -> str:
    """Write the page: head counts, then the rows of multimodal and of causal types."""
    head = _HEAD.replace("](docs/", "](")  # from docs
    parts = [head.format(version=version, processors=processors, media=media)]
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
    rows = run_bounded(chosen, os.cpu_count() or 1)
    if not arguments:
        processors, media = count_processors()
        PAGE.write_text(write_page(rows, media, processors, transformers.__version__), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
