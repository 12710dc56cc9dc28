"""Train the demo's model again, from nothing, and examine it.

examples:
  python -m tools.demo_model DIR                                       as the shipped one: half an hour of one core
  python -m tools.demo_model DIR --eye-steps 60 --answer-steps 100     a minute, to watch it learn
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.demo.accuracy import Marks, generate_answers, make_exam
from trinity.demo.pictures import UNSEEN_PAIRS

if TYPE_CHECKING:
    from tools.demo_model.train import Schedule


def main(arguments: Sequence[str] | None = None) -> int:
    """Train by the command line's ``arguments`` (None: this process's own), and print what was reached."""
    import torch
    from transformers.utils import logging

    from tools.demo_model.train import Schedule, train

    given = _read_arguments(arguments, Schedule())
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(given.threads)
    schedule = Schedule(given.eye_steps, given.answer_steps, rate=given.rate, seed=given.seed)
    train(given.directory, schedule, _say, given.start)
    examine(given.directory, given.questions)
    return 0


def _read_arguments(arguments: Sequence[str] | None, usual: Schedule) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the checkpoint is written")
    parser.add_argument("--eye-steps", type=int, default=usual.eye_steps)
    parser.add_argument("--answer-steps", type=int, default=usual.answer_steps)
    parser.add_argument("--rate", type=float, default=usual.rate, help="the highest learning rate")
    parser.add_argument("--start", type=Path, help="a checkpoint of this command to go on from")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--questions", type=int, default=1200, help="of the exam")
    return parser.parse_args(arguments)


def examine(directory: Path, questions: int) -> None:
    """Print how a checkpoint answers about pictures that it has not seen, by kind of question."""
    for words, exam in (
        ("unseen pictures", make_exam(questions)),
        ("pairs of colour and shape never seen together", make_exam(questions // 2, pairs=UNSEEN_PAIRS)),
    ):
        _say(f"{words}: {Marks.of(exam, generate_answers(directory, exam))}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
