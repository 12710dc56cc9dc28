"""Renders what was asked and answered as one page of HTML: pictures, questions, answers, and where they agree."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from trinity.demo.accuracy import ExamQuestion

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; color: #16181d; background: #f5f6f8; max-width: 76rem; margin: 0 auto;
  padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; } p { margin: .3rem 0; }
table { border-collapse: collapse; background: #fff; display: block; overflow-x: auto; width: fit-content;
  max-width: 100%; }
th, td { border: 1px solid #dfe2e7; padding: .3rem .8rem; text-align: left; white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .9rem; }
.card { background: #fff; border: 1px solid #dfe2e7; border-radius: .5rem; overflow: hidden; }
.card img { display: block; width: 100%; aspect-ratio: 1; } .card div { padding: .6rem .8rem .8rem; }
.kind, .blank { color: #5b6270; font-size: .85rem; }
.right { color: #0a6b2b; font-weight: 600; } .wrong { color: #b3261e; font-weight: 600; }
"""


class Card(NamedTuple):
    """One question with the answer it got, and the answer without the picture ("" where that was not asked)."""

    asked: ExamQuestion
    answer: str
    blank_answer: str = ""


def render_page(title: str, summary: Iterable[str], table: Sequence[Sequence[str]], cards: Iterable[Card]) -> str:
    """Render a page that loads nothing and runs no script.

    title: its heading.
    summary: sentences below it.
    table: rows of text, the first of them the names of the columns.
    cards: one for each picture.
    """
    words = "\n".join(f"<p>{escape(each)}</p>" for each in summary)
    shown = "\n".join(map(_render_card, cards))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{words}\n"
        f"<h2>The same tokens everywhere</h2>\n{_render_table(table)}\n<h2>Questions and answers</h2>\n"
        f'<div class="cards">\n{shown}\n</div>\n</body></html>\n'
    )


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    names = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _render_card(card: Card) -> str:
    scene, question = card.asked.scene, card.asked.question
    right = card.asked.is_right(card.answer)
    mark = "✓" if right else f"✗ (truth: {question.answer})"
    blank = f'<p class="blank">without the picture: {escape(card.blank_answer)}</p>' if card.blank_answer else ""
    return (
        f'<div class="card"><img alt="{escape(scene.describe())}" src="{_embed(card.asked.picture())}"><div>'
        f'<p class="kind">{question.kind}</p><p>{escape(question.text)}</p>'
        f'<p class="{"right" if right else "wrong"}">{escape(card.answer)} {escape(mark)}</p>{blank}</div></div>'
    )


def _embed(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
