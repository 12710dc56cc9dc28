"""The page of the demo: everything in one file, nothing loaded, and right told from wrong in signs too."""

from __future__ import annotations

import re

from examples.demo import Card, render_page
from trinity.demo.accuracy import make_exam


def test_a_page_has_each_picture_question_answer_and_truth() -> None:
    exam = make_exam(4)
    cards = [Card(each, each.question.answer, "nothing") for each in exam[:3]] + [Card(exam[3], "<b>&")]
    page = render_page("Shapes & more", ["75 % right"], [("method", "equal"), ("EPD", "4 of 4")], cards)
    assert page.count('<img alt="') == page.count("data:image/png;base64,") == 4
    for each in exam:
        assert each.scene.describe() in page
        assert each.question.text in page
    assert page.count("✓") == 3
    assert f"✗ (truth: {exam[3].question.answer})" in page
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert page.count("without the picture: nothing") == 3
    assert "<th>method</th>" in page
    assert "<td>4 of 4</td>" in page
    assert "Shapes &amp; more" in page


def test_it_loads_nothing_and_runs_nothing() -> None:
    page = render_page("t", [], [("a",)], [Card(each, "x") for each in make_exam(2)])
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "default-src 'none'" in page
