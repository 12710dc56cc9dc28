"""The model that comes with trinity: right about pictures that it has not seen, by the tokens of generate()."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path

import pytest

from trinity.demo import SHAPES_MODEL, draw_shapes
from trinity.demo.accuracy import ExamQuestion, Marks, generate_answers, make_exam
from trinity.demo.pictures import UNSEEN_PAIRS
from trinity.errors import ConfigError
from trinity.pipeline import Pipeline
from trinity.request import Output, Request
from trinity.testing.oracle import Oracle

EXAM = make_exam(60, seed=7)  # another one than that which ORIGIN.md reports
ORIGIN = SHAPES_MODEL / "ORIGIN.md"


def requests(exam: list[ExamQuestion]) -> list[Request]:
    return [Request(messages=each.messages, images=[each.picture()], max_tokens=16) for each in exam]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return Oracle(SHAPES_MODEL).generate_all(requests(EXAM))


async def serve(placement: str, exam: list[ExamQuestion]) -> list[Output]:
    async with Pipeline(SHAPES_MODEL, placement) as pipe:
        return list(await asyncio.gather(*map(pipe.complete, requests(exam))))


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
def test_nine_answers_in_ten_are_right_and_every_token_is_generates(placement: str, expected: list[list[int]]) -> None:
    outputs = asyncio.run(serve(placement, EXAM))
    assert [output.token_ids for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"stop"}
    marks = Marks.of(EXAM, [output.text for output in outputs])
    assert marks.share >= 0.9, str(marks)


def test_a_person_can_check_it() -> None:
    async def ask() -> list[str]:
        picture = draw_shapes({"top left": "red circle", "bottom left": "blue square"})
        async with Pipeline(SHAPES_MODEL) as pipe:
            answers = []
            for text in ("How many shapes are there?", "Where is the blue square?", "What colour is the circle?"):
                parts = [{"type": "text", "text": text}, {"type": "image"}]  # the image may stand behind the words
                request = Request(messages=[{"role": "user", "content": parts}], images=[picture])
                answers.append((await pipe.complete(request)).text.strip())
            return answers

    assert asyncio.run(ask()) == ["two", "below the red circle", "red"]


def test_its_origin_says_what_it_is() -> None:
    origin = ORIGIN.read_text(encoding="utf-8")
    assert hashlib.sha256((SHAPES_MODEL / "model.safetensors").read_bytes()).hexdigest() in origin
    assert "Apache-2.0" in origin
    assert "trinity.demo" in origin
    assert sum(path.stat().st_size for path in SHAPES_MODEL.iterdir()) < 3_000_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_accuracy_that_is_told_is_the_one_that_it_has() -> None:
    origin = ORIGIN.read_text(encoding="utf-8")
    for name, exam in (
        ("unseen pictures", make_exam(1200)),
        ("never seen together", make_exam(600, pairs=UNSEEN_PAIRS)),
    ):
        told = re.search(rf"{name}: ([\d.]+)%", origin)
        assert told is not None
        found = Marks.of(exam, generate_answers(SHAPES_MODEL, exam))
        assert abs(100 * found.share - float(told[1])) < 0.5, str(found)  # another processor may round elsewhere


def test_it_is_found_by_its_name_unless_a_directory_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Pipeline("shapes").model == SHAPES_MODEL
    (tmp_path / "shapes").mkdir()
    with pytest.raises(ConfigError, match="'shapes' has no config"):
        Pipeline("shapes")
