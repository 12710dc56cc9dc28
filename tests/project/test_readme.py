"""Every python block of the documents runs as it stands; only the checkpoint's path is put in."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from support.checkpoint_files import checkpoint
from support.document_server import ADDRESS, serving_as_told
from support.paths import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE = ("requests", "placements", "transports", "planning", "reliability", "gpu", "benchmarks")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: Path) -> list[tuple[int, str]]:
    """Line number and text of each python block."""
    text = document.read_text(encoding="utf-8")
    return [(text[: found.start()].count("\n") + 2, found.group(1)) for found in BLOCK.finditer(text)]


CASES = [
    pytest.param(document, line, block, id=f"{document.name}:{line}")
    for document in DOCUMENTS
    for line, block in blocks(document)
]


@pytest.mark.parametrize(("document", "line", "block"), CASES)
def test_block_runs(
    document: Path,
    line: int,
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    program = "\n" * (line - 1) + block.replace("path/to/llava", str(checkpoint("llava")))
    with contextlib.ExitStack() as running:
        if ADDRESS in program:
            server = serving_as_told(document, [sys.executable, "-m", "trinity"])
            program = program.replace(ADDRESS, running.enter_context(server))
        exec(compile(program, str(document), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.strip()
    assert said
    assert [line for line in re.findall(r"# prints (.*)$", block, re.MULTILINE) if line not in said] == []


def test_the_readme_shows_python() -> None:
    assert len(blocks(DOCUMENTS[0])) >= 3


@pytest.mark.parametrize("name", GUIDE)
def test_each_page_of_the_guide_has_an_example_and_says_what_has_run(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    assert blocks(page)
    assert "## Errors" in text or "Error`" in text
    assert "has run" in text


def test_every_fence_that_looks_like_python_is_marked_as_such() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert not [text for language, text in fences if language != "python" and "import trinity" in text]
