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

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
MOST_SECONDS, MOST_BYTES = 300, 16 << 30  # of one type
LISTED, CHECKED, REFUSED = "serves, listed", "serves by self-check", "refused"
_HEAD = """# Models
Written by `make models`, which builds a tiny checkpoint of every causal, image-text and multimodal type of
transformers {version} and loads it as a pipeline does. *Listed*: the tests compare it with `generate()`. *By
self-check*: it proves itself as it is loaded ([0006](decisions/0006-what-a-model-must-prove.md),
[0099](decisions/0099-a-proof-for-models-that-nobody-listed.md)). `trinity check MODEL` does so for a checkpoint of
yours. A refusal names the part. One that says "tiny checkpoint" is of the table itself: no small model of that type
could be made here, and yours may serve.

{processors} of {media} multimodal types have an image processor that loads without torchvision.
"""


class Row(msgspec.Struct, frozen=True):
    """A row of the table: a type, what comes of it, and in which part a refused one differs."""

    model_type: str
    outcome: str
    said: str = ""


def try_media(model_type: str, folder: Path) -> Row:
    """Build a multimodal type and run its proof."""
    from trinity.preprocess.model_types import PROVEN
    from trinity.stages.proof import prove
    from trinity.testing.any_media_checkpoint import build_any_media
    from trinity.testing.checkpoints import ARCHITECTURES, build_checkpoint

    if model_type in PROVEN and model_type in ARCHITECTURES:
        build_checkpoint(model_type, folder)
        return Row(model_type, LISTED, "image, text")
    try:
        build_any_media(model_type, folder)
    except Exception as error:
        return Row(model_type, REFUSED, f"tiny checkpoint: {shorten(error)}")
    verdict = prove(folder)
    if verdict.failed is None:
        return Row(model_type, CHECKED, ", ".join(verdict.serves))
    return Row(model_type, REFUSED, f"{verdict.failed.name}: {shorten(verdict.failed.said)}")


def try_text(model_type: str, folder: Path) -> Row:
    """Build a causal type and load it, self-check and all."""
    from trinity.errors import UnsupportedModel
    from trinity.preprocess.checkpoint import read_config
    from trinity.stages.models import find_adapter, load_model
    from trinity.testing.any_text_checkpoint import build_any_text

    try:
        build_any_text(model_type, folder)
    except Exception as error:
        return Row(model_type, REFUSED, f"tiny checkpoint: {shorten(error)}")
    try:
        load_model(folder, "PD", dtype="float32")
    except UnsupportedModel as error:
        return Row(model_type, REFUSED, shorten(error))
    return Row(model_type, LISTED if find_adapter(read_config(folder))[1] else CHECKED, "text")


def shorten(said: object, most: int = 200) -> str:
    """Write an error as one line without a pipe or a path of this machine."""
    text = " ".join(str(said).replace("|", "\\|").replace("<", "&lt;").split())
    text = " ".join(word for word in text.split(" ") if "/tmp/" not in word)
    return text if len(text) <= most else text[: most - 1] + "…"


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
        return Row(model_type, REFUSED, f"tiny checkpoint: its process ended with {ended} within {MOST_SECONDS} s")


def _answer(work: Callable[[str, Path], Row], model_type: str, folder: Path, answer: Path) -> None:
    """Write the row of a type and end this process."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        try:
            row = work(model_type, folder)
        except Exception as error:
            row = Row(model_type, REFUSED, shorten(f"{type(error).__name__}: {error}"))
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


def list_work() -> list[tuple[str, Callable[[str, Path], Row]]]:
    """List all types, multimodal ones first, each with what tries it."""
    from trinity.testing.any_media_checkpoint import multimodal_types
    from trinity.testing.any_text_checkpoint import list_causal_types

    media = multimodal_types()
    return [
        *((name, try_media) for name in media),
        *((name, try_text) for name in list_causal_types() if name not in media),
    ]


def count_processors() -> tuple[int, int]:
    """Count the multimodal types whose image processor loads here, and all of them."""
    from trinity.testing.any_media_checkpoint import make_image_processor, multimodal_types
    from trinity.testing.any_media_sizes import TypeSizes
    from trinity.testing.any_media_types import OWN_SIZES

    loaded = 0
    for name in multimodal_types():
        try:
            make_image_processor(name, OWN_SIZES.get(name, TypeSizes()))
            loaded += 1
        except Exception:  # what has none, or asks for more than is here
            continue
    return loaded, len(multimodal_types())


def write_page(rows: Sequence[Row], media: int, processors: int, version: str) -> str:
    """Write the page: head counts, then the rows of multimodal and of causal types."""
    parts = [_HEAD.format(version=version, processors=processors, media=media)]
    for title, part in (("Multimodal types", rows[:media]), ("Text types", rows[media:])):
        counts = Counter(row.outcome for row in part)
        serving = counts[LISTED] + counts[CHECKED]
        parts.append(
            f"\n## {title}\n{serving} of {len(part)} serve: {counts[LISTED]} listed, {counts[CHECKED]} by self-check; "
            f"{counts[REFUSED]} are refused.\n\n| type | | |\n|---|---|---|\n"
        )
        parts += [f"| {row.model_type} | {row.outcome} | {row.said} |\n" for row in part]
    return "".join(parts)


def read_rows(page: str) -> Iterator[Row]:
    """Read the rows of a page back."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[1] in (LISTED, CHECKED, REFUSED):
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
        PAGE.write_text(write_page(rows, media, processors, transformers.__version__), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
