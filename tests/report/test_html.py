"""The report: one page that parses, loads nothing, escapes what it is given and says what the plan says."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from support.figure_contents import STEPS, outcome, replay
from support.plans import BEST, plan
from trinity.errors import ConfigError
from trinity.traces.trace import SLO

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trinity-epd[plot]'")

from trinity import report

VOID = {"meta", "img", "br"}
RUNS = {"2EP2D": {8.0: replay(outcome(), outcome(), timeline=STEPS)}, "4EPD": {8.0: replay(outcome(0.4))}}


class Page(HTMLParser):
    """Reads a page; a tag that is not closed in its turn is an error."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"

    def values(self, name: str) -> list[str]:
        return [value for _, each, value in self.attributes if each == name]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    spans = {"2EP2D": {"encode": 0.1, "decode": 0.4}}
    report.save_report(path, plan(), replays=RUNS, plans=[plan(), plan(slo=SLO(9, 9))], served=spans)
    assert [each.name for each in path.parent.iterdir()] == ["plan.html"]
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(content: str) -> Page:
    return Page(content)


def test_it_says_what_the_plan_says(page: Page) -> None:
    for line in plan().explain().splitlines():
        assert page.text.count(line) == 1
    for heading in ("Plan for llava-1.5-7b", "2EP2D at its goodput", "Other SLOs", "Replays", "Where the time goes"):
        assert heading in page.text
    assert "4EPD" in page.text  # a candidate
    assert "14.00 GB" in page.text
    assert "75.0%" in page.text  # of D0's KV blocks
    assert "600 ms" not in page.text


def test_what_the_table_says_is_not_said_again(tmp_path: Path) -> None:
    """A plan's notes stand below its table, and some of them in its explanation too."""
    note = plan().explain().splitlines()[-1]
    report.save_report(tmp_path / "plan.html", plan(notes=(note,)))
    assert Page((tmp_path / "plan.html").read_text(encoding="utf-8")).text.count(note) == 1


def test_every_picture_is_in_the_page_and_can_be_read(page: Page) -> None:
    sources = page.values("src")
    assert len(sources) == 8  # ratios, attainment, utilisation, SLOs, scatter, radar, one timeline, breakdown
    for source in sources:
        kind, _, content = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn = ElementTree.fromstring(base64.b64decode(content))
        assert drawn.tag.endswith("svg")
        links = [value for each in drawn.iter() for name, value in each.attrib.items() if name.endswith("href")]
        assert all(value.startswith(("#", "data:")) for value in links)
        assert not any(
            each.tag.endswith(("script", "style")) and "import" in (each.text or "") for each in drawn.iter()
        )
    assert len(page.values("alt")) == 8
    assert all(page.values("alt"))


def test_nothing_is_loaded_and_no_script_runs(page: Page, content: str) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "a"} & set(page.tags)
    assert page.values("href") == []
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert "default-src 'none'" in page.values("content")[0]
    whole = re.sub(r"base64,[^\"]*", "", content)
    assert "://" not in whole
    assert "url(" not in whole
    assert "@import" not in whole


def test_names_are_escaped_and_a_plan_that_nothing_meets_says_so() -> None:
    evil = "<script>alert('x')</script>&\"me\"$\\frac$"
    best = msgspec.structs.replace(BEST, memory={evil: {"kv": 1e9}})
    runs = {evil: {8.0: replay(outcome(), timeline=STEPS)}}
    named = Page(report.render_html(plan(model=evil, notes=(evil,), best=best, met=False), replays=runs))
    assert "script" not in named.tags
    assert f"\nPlan for {evil}\n" in named.text
    assert f"\nnote: {evil}\n" in named.text
    assert f"\n{evil}\n" in named.text  # the memory's table
    assert not [alt for alt in named.values("alt") if alt.startswith("Ranks")]  # of one deployment
    assert f"What ran when: {evil} at 8 requests/s" in named.values("alt")
    assert "meets the SLO at any rate" in named.text
    assert "no candidate meets the SLO" in " ".join(named.values("alt"))


def test_a_plan_without_more_has_no_empty_sections() -> None:
    bare = msgspec.structs.replace(BEST, memory={}, utilisation={}, attainment=())
    found = Page(report.render_html(plan(best=bare, candidates=(bare,), paper=None)))
    assert len(found.values("src")) == 3
    for heading in ("Other SLOs", "Replays", "Where the time goes", "GB"):
        assert heading not in found.text


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="trinity"):
        report.save_report(tmp_path / "plan.html", plan())
    assert list(tmp_path.iterdir()) == []
