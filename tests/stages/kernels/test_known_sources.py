"""The table of known sources is that of the installed releases; fingerprints tell what matters from what does not."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from itertools import count
from types import FunctionType
from typing import Any

import pytest
from torch import nn

from tools import known_sources as tool
from trinity.stages.kernels.admission import fingerprint_part
from trinity.stages.kernels.fingerprints import fingerprint_class, fingerprint_function, fingerprint_text
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, LayerPart


def test_every_source_is_as_it_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Where this fails, a release has changed a source: read it again (decision 0039), then add its fingerprint."""
    assert tool.changed_sources() == []
    assert tool.main() == 0
    assert "sources are as they were read" in capsys.readouterr().out


def test_a_source_that_changed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(KNOWN_SOURCES, LayerPart.TOWER, {"0": "clip:CLIPEncoder clip:NoSuchThing nothing:Here"})
    now = fingerprint_part(LayerPart.TOWER, tool.find_source("clip:CLIPEncoder"))
    assert tool.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"TOWER: read clip:CLIPEncoder again: it is {now} now; known: 0"
    assert [line.split(" now;")[0].split()[-1] for line in said[1:]] == ["gone", "gone"]


def test_every_part_is_listed() -> None:
    assert set(KNOWN_SOURCES) == set(LayerPart)
    assert all(len(each) == 16 and int(each, 16) for known in KNOWN_SOURCES.values() for each in known)


# ---------------------------------------------------------------- what a fingerprint covers

PLAIN = """
SCALE = 2.0

def helper(x, by=1):
    return x * by

def forward(self, x):
    return helper(x) * SCALE + self.offset
"""


@pytest.fixture
def compiled() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Modules of some text, whose source ``inspect`` finds."""
    numbers = count()

    def make(text: str) -> dict[str, Any]:
        name = f"<known source {next(numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"__name__": "somebodys.module"}
        exec(compile(text, name, "exec"), space)
        return space

    yield make
    for name in [each for each in linecache.cache if each.startswith("<known source")]:
        del linecache.cache[name]


ALIKE = {
    "comment": PLAIN.replace("return helper", "# as before\n    return helper"),
    "docstring": PLAIN.replace("x):\n", 'x):\n    """Do it."""\n'),
    "annotations": PLAIN.replace("(self, x)", "(self, x: int) -> int"),
    "layout": PLAIN.replace("helper(x) * SCALE", "(helper(\n        x\n    ) * SCALE)"),
    "number": PLAIN.replace("2.0", "2.00"),
    "further": PLAIN + "\ndef another():\n    return 3\n",
}
OTHER = {
    "expression": PLAIN.replace("+ self", "- self"),
    "constant": PLAIN.replace("2.0", "2.1"),
    "helper": PLAIN.replace("x * by", "x + by"),
    "default": PLAIN.replace("by=1", "by=2"),
    "attribute": PLAIN.replace("self.offset", "self.other"),
    "argument": PLAIN.replace("helper(x)", "helper(x, by=x)"),
}


@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE)
def test_what_does_not_matter(text: str, compiled: Callable[[str], dict[str, Any]]) -> None:
    assert fingerprint_function(compiled(text)["forward"]) == fingerprint_function(compiled(PLAIN)["forward"])


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_what_matters(text: str, compiled: Callable[[str], dict[str, Any]]) -> None:
    assert fingerprint_function(compiled(text)["forward"]) != fingerprint_function(compiled(PLAIN)["forward"])


def test_a_helper_that_was_replaced_is_seen(compiled: Callable[[str], dict[str, Any]]) -> None:
    """The code of the method is the same; what it finds by a name is not."""
    space = compiled(PLAIN)
    own: FunctionType = space["forward"]
    before = fingerprint_function(own)
    space["helper"] = compiled(OTHER["helper"])["helper"]
    assert fingerprint_function(own) != before
    assert fingerprint_text(own) == fingerprint_text(compiled(OTHER["helper"])["forward"]), "the text alone is the same"


def test_methods_that_a_method_names_are_read(compiled: Callable[[str], dict[str, Any]]) -> None:
    space = compiled("def forward(self, x):\n    return self.inner(x)\n\ndef inner(self, x):\n    return x + 1\n")
    other = compiled("def inner(self, x):\n    return x + 2\n")
    made = [
        type("Layer", (nn.Module,), {"forward": space["forward"], "inner": each["inner"]}) for each in (space, other)
    ]
    assert fingerprint_class(made[0]) != fingerprint_class(made[1])
    assert fingerprint_class(made[0]) == fingerprint_class(type("Other", (made[0],), {}))
    changed = type("Mine", (made[0],), {"inner": other["inner"]})
    assert fingerprint_class(changed) == fingerprint_class(made[1])


def test_what_a_decorator_closes_over_is_read(compiled: Callable[[str], dict[str, Any]]) -> None:
    text = "def wrap(factor):\n    def forward(self, x):\n        return x * factor\n    return forward\n"
    space = compiled(text)
    two, three = space["wrap"](2), space["wrap"](3)
    assert fingerprint_function(two) != fingerprint_function(three)
    assert fingerprint_function(two) == fingerprint_function(space["wrap"](2))


HOLDERS = """
from functools import partial
class Call:
    def __init__(self, factor):
        self.factor = factor
    def __call__(self, x):
        return x * {code}

def helper(x, y=1):
    return x * {code}

TABLE = {value}

def forward(self, x, *, by=TABLE):
    return x * TABLE
"""


@pytest.mark.parametrize(
    ("value", "code", "other", "other_code"),
    [
        ("2", "1", "3", "1"),
        ("(1, 2)", "1", "(1, 3)", "1"),
        ("[1, [2]]", "1", "[1, [3]]", "1"),
        ("{'a': (1,)}", "1", "{'a': (2,)}", "1"),
        ("{'a': 1}", "1", "{'b': 1}", "1"),
        ("{1, 2}", "1", "{1, 3}", "1"),
        ("{'a': helper}", "1", "{'a': helper}", "2"),
        ("partial(helper, 1)", "1", "partial(helper, 1)", "2"),
        ("partial(helper, 1)", "1", "partial(helper, 2)", "1"),
        ("partial(helper, y=1)", "1", "partial(helper, y=2)", "1"),
        ("partial(len)", "1", "partial(sum)", "1"),
        ("Call(1)", "1", "Call(1)", "2"),
        ("Call(1)", "1", "Call(2)", "1"),
    ],
)
@pytest.mark.parametrize("place", ["global", "default", "keyword"])
def test_what_is_held_is_read(
    value: str, code: str, other: str, other_code: str, place: str, compiled: Callable[[str], dict[str, Any]]
) -> None:
    def fingerprint(value: str, code: str) -> str | None:
        made = compiled(HOLDERS.format(value=value, code=code))
        function: FunctionType = made["forward"]
        if place != "keyword":
            function.__kwdefaults__ = None
        if place == "default":
            function.__defaults__ = (made["TABLE"],)
        if place != "global":
            del made["TABLE"]
        return fingerprint_function(function)

    assert fingerprint(value, code) == fingerprint(value, code) != fingerprint(other, other_code)
    assert fingerprint(other, other_code) is not None


def test_a_container_that_holds_itself_is_read_once(compiled: Callable[[str], dict[str, Any]]) -> None:
    space = compiled("TABLE = [1]\nTABLE.append(TABLE)\n\ndef forward(self, x):\n    return TABLE\n")
    before = fingerprint_function(space["forward"])
    space["TABLE"][0] = 2
    assert before is not None
    assert fingerprint_function(space["forward"]) != before


def test_what_has_no_source_has_no_fingerprint() -> None:
    assert fingerprint_function(len) is None
    assert fingerprint_text(len) is None
    assert fingerprint_text(None) is None
    assert fingerprint_class(nn.Module) is None
