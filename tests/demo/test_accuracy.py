"""The exam: new pictures, fair marks."""

from __future__ import annotations

from trinity.demo.accuracy import ExamQuestion, Marks, make_exam
from trinity.demo.pictures import UNSEEN_PAIRS
from trinity.demo.questions import QUESTION_KINDS


def test_an_exam_is_drawn_by_its_seed() -> None:
    one, again, other = make_exam(30, 1), make_exam(30, 1), make_exam(30, 2)
    assert one == again != other
    assert make_exam(10, 1) == one[:10]
    assert {each.question.kind for each in make_exam(200)} == set(QUESTION_KINDS)


def test_pairs_never_seen_are_asked_about_alone() -> None:
    exam = make_exam(50, pairs=UNSEEN_PAIRS)
    assert {(shape.colour, shape.shape) for each in exam for shape in each.scene.shapes} == set(UNSEEN_PAIRS)


def test_marks_count_by_kind() -> None:
    exam = make_exam(40)
    answers = [f" {each.question.answer}" for each in exam]
    assert Marks.of(exam, answers).share == 1.0
    first = exam[0].question.kind
    answers[0] = "nothing of the kind"
    marks = Marks.of(exam, answers)
    assert marks.share == 39 / 40
    assert marks.asked[first] - marks.right[first] == 1
    assert f"{first} {marks.right[first]}/{marks.asked[first]}" in str(marks)
    assert str(marks).startswith("97.5% (")


def test_an_answer_is_right_as_a_whole_or_not_at_all() -> None:
    asked: ExamQuestion = next(each for each in make_exam(60) if each.question.kind == "describe")
    assert asked.is_right(f"  {asked.question.answer}\n")
    assert not asked.is_right(asked.question.answer.rpartition(" ")[0])
    assert not asked.is_right(f"{asked.question.answer} and more")


def test_the_chat_asks_about_the_picture_beside_it() -> None:
    (asked,) = make_exam(1)
    (message,) = asked.messages
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][1]["text"] == asked.question.text
    assert asked.picture().size == (256, 256)
