"""The demo: what a newcomer runs first, as a program; and what it says where something is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples import demo
from support.checkpoint_files import checkpoint
from trinity.demo.questions import QUESTION_KINDS
from trinity.testing.oracle import Oracle

QUESTIONS = demo.OF_A_KIND * len(QUESTION_KINDS)
DEMO = Path(demo.__file__)
ROW = re.compile(r"^(\S+) +([\d.]+) +([\d.]+) +(\d+) +(\d+) +(\d+) +([\d.]+) +(\d+) of (\d+)$", re.MULTILINE)


def rows(text: str) -> dict[str, list[float]]:
    """The table by method: TTFT, ITL, image moves, KV moves, cached, MiB, equal, requests."""
    return {found[0]: [float(number) for number in found[1:]] for found in ROW.findall(text)}


@pytest.mark.timeout(600)  # ten times what it takes
def test_as_a_newcomer_runs_it(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:trinity", str(DEMO)],
        cwd=tmp_path,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.endswith("Every token equals generate().\n")
    assert run.stderr == "", "a newcomer wonders about every line here"
    check_table(run.stdout)
    check_answers(run.stdout)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()] == [
        "build/demo.html"
    ]
    page = (tmp_path / "build" / "demo.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == page.count("without the picture: ") == QUESTIONS


def check_table(said: str) -> None:
    """Every placement and transport has a row, moves what it has to, and gives the tokens of generate()."""
    table = rows(said)
    assert list(table) == [
        *("EPD", "EP+D", "ED+P", "E+P+D"),
        *(f"{method}@{scheme}" for scheme in demo.SCHEMES for method in ("E+P+D", "ED+P")),
    ]
    for scheme in demo.SCHEMES:
        assert re.search(rf"^{scheme} +image +\d+ ", said, re.MULTILINE)
        assert re.search(rf"^{scheme} +kv +\d+ ", said, re.MULTILINE)
    for method, (ttft, itl, images, kv, cached, moved, equal, count) in table.items():
        assert equal == count == QUESTIONS
        assert ttft > 0
        assert itl > 0
        split = "+" in method
        assert kv == (count if split else 0)
        assert (images + cached > 0) == (method.partition("@")[0] in ("ED+P", "E+P+D"))
        assert (moved > 0) == split
    for method in demo.METHODS:
        assert re.search(rf"^{re.escape(method)}: instances .*\n  .*\?: .{{3,}}$", said, re.MULTILINE)


def check_answers(said: str) -> None:
    """Answers are right, and no better than guesses where the images are lost; one of each kind is shown."""
    right, kinds = re.search(r"^Right: ([\d.]+)% \((.*)\)$", said, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert float(right) >= 90
    assert [each.rpartition("/")[2] for each in kinds.split(", ")] == [str(demo.OF_A_KIND)] * len(QUESTION_KINDS)
    shares = dict(re.findall(r"^Right (.*): ([\d.]+)%$", said, re.MULTILINE))
    blind, chance = (float(shares[name]) for name in ("where image blocks are zeroed on their way", "by guessing"))
    assert blind < 45
    assert blind < chance + 10
    for kind in QUESTION_KINDS:
        assert re.search(
            rf"^{kind} +\S.*\?\n +\[ .* \| .* \]  answer: .+\n +\[ .* \| .* \]  truth:  .+$", said, re.MULTILINE
        )


def test_questions_are_as_many_of_each_kind() -> None:
    exam = demo.pick_exam()
    assert Counter(each.question.kind for each in exam) == dict.fromkeys(QUESTION_KINDS, demo.OF_A_KIND)
    assert [each.question.kind for each in exam[: len(QUESTION_KINDS)]] == list(QUESTION_KINDS)
    assert len({each.scene for each in exam}) == QUESTIONS


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
    monkeypatch.setattr(demo, "SCHEMES", ())  # instances in processes are in the newcomer's run
    with pytest.raises(SystemExit) as left:
        demo.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(("name", "methods"), [("qwen2_5_vl", demo.METHODS), ("llama", demo.TEXT_METHODS)])
def test_a_model_of_the_users_own(
    name: str, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--model", str(checkpoint(name)), "--max-tokens", "8") == 0
    said = capsys.readouterr().out
    assert "Every token equals generate()." in said
    assert tuple(rows(said)) == methods


def test_a_difference_is_found_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = Oracle.generate_all

    def other(oracle: Oracle, asked: list[object]) -> list[list[int]]:
        first, *rest = real(oracle, asked)  # type: ignore[arg-type]
        return [[*first[:-1], first[-1] + 1], *rest]

    monkeypatch.setattr(Oracle, "generate_all", other)
    assert run_main(monkeypatch, "--model", str(checkpoint("llama")), "--max-tokens", "4") == 1
    said = capsys.readouterr().out
    assert "TOKENS DIFFER" in said
    assert {tuple(values[-2:]) for values in rows(said).values()} == {(3.0, 4.0)}


def test_no_model_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_main(monkeypatch, "--model", str(tmp_path / "nowhere")) == 2
    assert re.search(r"demo: .*does not exist; give the directory", capsys.readouterr().err)


def test_the_photographs_come_with_their_licence() -> None:
    licences = (DEMO.parent / "photos" / "LICENSES.md").read_text(encoding="utf-8")
    assert len(demo.PHOTOS) >= 3
    for photo in demo.PHOTOS:
        assert photo.name in licences
