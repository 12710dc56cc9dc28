"""Docstrings as reStructuredText, for the reference pages.

The project's docstrings are plain text: paragraphs, ``literals``, blocks behind a line that ends in "::", lists that
begin with "- ", and keywords, one a line ("name (unit, default): meaning", what follows indented). Every other sign
stands for itself, so that no docstring can break the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

LITERAL = re.compile(r"(``.+?``)")
MARKUP = re.compile(r"([\\*|`]|(?<=\w)_(?!\w))")
KEYWORD = re.compile(r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*)((?: \([^)]*\))?: .*)")
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (trinity[\w.]*)", re.MULTILINE)


@cache
def public_names(reference: Path) -> dict[str, str]:
    """Full names by short ones, of all classes and functions that the reference pages document by name."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(reference.glob("*.rst"))]
    full = [name for text in texts for kind, name in DIRECTIVE.findall(text) if kind != "module"]
    return {name.rpartition(".")[2]: name for name in full}


def restructured(lines: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """The same text as reStructuredText; ``known`` names become links, indented lines of prose keep their places."""
    written = [_written(block, known, first=not at) for at, block in enumerate(_blocks(lines))]
    return [line for block in written for line in block]


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """Runs of lines that are blank, literal (indented, behind "::"), or text; one after another."""
    held: list[str] = []
    literal = False
    for line in lines:
        if literal and line.strip() and not line.startswith(" "):
            yield held
            held, literal = [], False
        if not literal and not line.strip():
            yield [*held, ""]
            literal, held = bool(held) and held[-1].endswith("::"), []
        else:
            held.append(line)
    yield held


def _written(block: Sequence[str], known: Mapping[str, str], *, first: bool) -> list[str]:
    """One block; the ``first``, a summary, lists no keywords."""
    text = [line for line in block if line.strip()]
    if not text or all(line.startswith(" ") for line in text) or text == ["::"]:
        return [line.replace("``", "") for line in block]  # a literal block has no marks of its own
    if not first and all(line.startswith(" ") or KEYWORD.fullmatch(line) for line in text):
        return [item for line in block for item in _keyword(line, known)]
    escaped = [_escaped(line, known) for line in block]
    if any(line.startswith(" ") for line in text) and not text[0].startswith("- "):
        return [f"| {line}" if line.strip() else line for line in escaped]  # a line block keeps indentation
    return escaped


def _keyword(line: str, known: Mapping[str, str]) -> list[str]:
    """A line of a list of keywords as a line of a bullet list."""
    found = KEYWORD.fullmatch(line)
    if found is None:
        return [f"  {_escaped(line.strip(), known)}" if line else line]
    names = ", ".join(f"``{name}``" for name in found[1].split(", "))
    return [f"- {names}{_escaped(found[2], known)}"]


def _escaped(line: str, known: Mapping[str, str]) -> str:
    """One line of prose, in which signs of markup stand for themselves."""
    parts = LITERAL.split(line)
    return "".join(_linked(part, known) if part.startswith("``") else MARKUP.sub(r"\\\1", part) for part in parts)


def _linked(literal: str, known: Mapping[str, str]) -> str:
    name = literal.strip("`")
    return f":py:obj:`{name} <{known[name]}>`" if name in known else literal
