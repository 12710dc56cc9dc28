"""The site: every page is reached from the first, every public name is in the reference; the slow test builds it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import trinity
from support.paths import ROOT
from tools import build_site, check_docs, docstrings

REFERENCE = ROOT / "docs" / "site" / "reference"
KNOWN = {"Pipeline": "trinity.Pipeline", "save": "trinity.report.save_report"}


def test_the_reference_has_each_public_name_once() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.rst"))
    found = re.findall(r"^\.\. auto(?:class|function):: trinity\.(\w+)$", pages, re.MULTILINE)
    assert sorted({*found}) == sorted({*trinity.__all__} - {"errors"} - errors_at_the_root())
    assert len(found) == len(set(found))


def errors_at_the_root() -> set[str]:
    """Those are documented where they live."""
    return {name for name in trinity.__all__ if hasattr(trinity.errors, name)}


def test_members_that_the_reference_lists_are_there_and_say_what_they_do() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.rst"))
    listed = re.findall(r"^\.\. autoclass:: trinity\.(\w+)\n   :members: (.+)$", pages, re.MULTILINE)
    assert {name for name, _ in listed} == {"Pipeline", "Stream", "SyncPipeline"}
    for name, members in listed:
        for member in members.split(", "):
            assert inspect.getdoc(getattr(getattr(trinity, name), member)), f"{name}.{member}"


def test_each_page_of_the_reference_is_in_its_index() -> None:
    index = (REFERENCE / "index.rst").read_text(encoding="utf-8")
    listed = set(re.findall(r"^   (\w+)$", index, re.MULTILINE))
    assert listed == {page.stem for page in REFERENCE.glob("*.rst")} - {"index"}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.stage(ROOT, folder)
    return folder


def test_every_page_is_in_one_table_of_contents(staged: Path) -> None:
    listed = re.findall(r"^((?:[\w.-]+/)*[\w.-]+)$", "\n".join(trees(staged)), re.MULTILINE)
    pages = {path.relative_to(staged).with_suffix("").as_posix() for path in staged.rglob("*.[mir][dps]*")}
    pages = {name for name in pages if not name.startswith("reference/") or name == "reference/index"}
    assert sorted(listed) == sorted(pages - {"index"})


def trees(staged: Path) -> list[str]:
    """The entries of all tables of contents, counted from the root."""
    entries: list[str] = []
    lists = [staged / "docs" / folder / "index.md" for folder in ("decisions", "data")]
    for page in (staged / "index.md", *lists):
        above = page.parent.relative_to(staged)
        for tree in re.findall(
            r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            entries += [(above / name).as_posix() for name in names]
    return entries


def test_each_benchmark_has_a_page_of_all_its_tables(staged: Path) -> None:
    text = (staged / "docs" / "data" / "served.md").read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "Trials:\n\n|" in text
    performance = (staged / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "](data/served.md)" in performance
    assert "](data/index.md)" in performance


def test_links_hold_among_the_pages(staged: Path) -> None:
    assert list(check_docs.broken_links(staged)) == []
    assert (staged / "examples" / "photos" / "cat.jpg").exists()


@pytest.mark.parametrize(
    ("link", "there"),
    [
        ("README.md", "index.md"),
        ("../../README.md#what-serves", "../../index.md#what-serves"),
        ("docs/data/", "docs/data/index.md"),
        ("data/served.json", "data/served.md"),
        ("src/data/ORIGIN.md", "src/data/ORIGIN.md"),
        ("https://example.org/README.md", "https://example.org/README.md"),
    ],
)
def test_links_lead_to_the_pages_that_documents_become(link: str, there: str) -> None:
    assert build_site.as_page(f"See [this]({link}), README.md.") == f"See [this]({there}), README.md."


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("A ``literal`` of ``Pipeline``.", "A ``literal`` of :py:obj:`Pipeline <trinity.Pipeline>`."),
        ("*args, `x`, a|b, end_ and in_between", r"\*args, \`x\`, a\|b, end\_ and in_between"),
        ("As so::\n\n    a * b_\n\n    | c\n\nAnd *so*.", "As so::\n\n    a * b_\n\n    | c\n\nAnd \\*so\\*."),
        ("::\n\n    run(*args)", "::\n\n    run(*args)"),
        ("- one*\n- two\n  ``save``", "- one\\*\n- two\n  :py:obj:`save <trinity.report.save_report>`"),
        ("a table\n  of *two*", "| a table\n|   of \\*two\\*"),
        (
            "draw: requests.\n\nrate (requests/s, None): of *all*,\n    see ``save``.\n**options: others.\na, b: two",
            "draw: requests.\n\n- ``rate`` (requests/s, None): of \\*all\\*,\n"
            "  see :py:obj:`save <trinity.report.save_report>`.\n- ``**options``: others.\n- ``a``, ``b``: two",
        ),
        ("One.\n\nnote: a paragraph\nof two lines", "One.\n\nnote: a paragraph\nof two lines"),
        ("", ""),
    ],
)
def test_docstrings_are_plain_text_with_literals(text: str, written: str) -> None:
    assert "\n".join(docstrings.restructured(text.split("\n"), KNOWN)) == written


def test_known_names_are_those_that_the_reference_documents(tmp_path: Path) -> None:
    (tmp_path / "a.rst").write_text(".. autoclass:: trinity.Pipeline\n\n.. automodule:: trinity.traces\n")
    assert docstrings.public_names(tmp_path) == {"Pipeline": "trinity.Pipeline"}


class Loaded(HTMLParser):
    """What a page loads as it is shown: links that one follows are not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
        self.found += [value for name, value in attrs if name == names.get(tag) and value]


def loaded(page: str) -> list[str]:
    parser = Loaded()
    parser.feed(page)
    return [each for each in parser.found if re.match(r"(https?:)?//", each)]


def test_what_a_page_loads_from_elsewhere_is_seen() -> None:
    assert loaded('<a href="https://x.org">x</a><script src="a.js"></script>') == []
    assert loaded('<script src="https://x.org/a.js"></script>') == ["https://x.org/a.js"]
    assert loaded('<link rel="stylesheet" href="//x.org/a.css">') == ["//x.org/a.css"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere() -> None:
    command = [sys.executable, "tools/build_site.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert run.returncode == 0, run.stderr[-4000:]
    site = ROOT / "build" / "docs"
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {name: loaded(text) for name, text in pages.items() if loaded(text)} == {}
    assert "Raises" in pages["reference/serving.html"]
    assert "kv P0" in pages["examples/notebook.html"]
    assert pages["examples/plan.html"].count("<img") >= 2
    assert not [path for path in site.rglob("*.css") if re.search(r"@import|url\(.?(https?:)?//", path.read_text())]
