"""Letters of stages are written in the table of stages and in names of methods; all other code asks the table."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT
from trinity.stage_kinds import all_letters

SOURCES = ROOT / "src" / "trinity"
TABLE = "stage_kinds.py"
METHODS = {  # names of disaggregation methods, and the default placement, which is one of them
    "placement.py": {"METHODS"},
    "planner/candidates.py": {"ALL_METHODS", "TEXT_METHODS"},
    "report/plots/plans.py": {"_METHOD_COLOURS"},
}
DEFAULT, DEFAULTS = (
    "EPD",
    {"pipeline/config.py": 1, "server/batch.py": 1, "server/command.py": 1}
    | {
        "bench/commands.py": 2,
        "bench/servers.py": 1,
    },
)
OTHER_SENSES = ("preprocess/media/images.py", "preprocess/media/image_prices.py")  # "P" is a mode of pictures there


def list_letters(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal that is made of letters of stages alone, in f-strings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text and len(set(text)) == len(text) and set(text) <= set(all_letters()):
                yield node.lineno, text


def drop_names(tree: ast.Module, names: set[str]) -> ast.Module:
    """Leave out assignments of these names, and type variables."""
    kept = [
        node
        for node in tree.body
        if not (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets))
        and not (isinstance(node, ast.Assign) and "ParamSpec" in ast.dump(node.value))
    ]
    return ast.Module(body=kept, type_ignores=[])


def find_letters(path: Path, name: str) -> list[tuple[int, str]]:
    """List the letters in a file that are none of a method's name."""
    tree = drop_names(ast.parse(path.read_text()), METHODS.get(name, set()))
    found = list(list_letters(tree))
    if Counter(text for _, text in found)[DEFAULT] == DEFAULTS.get(name, 0):
        found = [each for each in found if each[1] != DEFAULT]
    return found


def test_letters_are_written_in_the_table_alone() -> None:
    wrong = []
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if name != TABLE and name not in OTHER_SENSES:
            wrong += [f"{name}:{line} {text!r}" for line, text in find_letters(path, name)]
    assert not wrong, f"ask trinity.stage_kinds for the property that is meant: {wrong}"


def test_exceptions_are_still_needed() -> None:
    for name, variables in METHODS.items():
        tree = ast.parse((SOURCES / name).read_text())
        assigned = {
            t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        assert variables <= assigned, f"{name} has no {variables - assigned} any more"
    for name, count in DEFAULTS.items():
        found = Counter(text for _, text in list_letters(ast.parse((SOURCES / name).read_text())))
        assert found[DEFAULT] == count, f"{name} has the default placement {found[DEFAULT]} times"


@pytest.mark.parametrize(
    "source",
    ['"E" in roles', 'set(roles) & {"P", "D"}', 'f"{count}EP"', 'roles == "D"', 'order = "EPD"', '"PD".index(x)'],
)
def test_what_is_found(source: str) -> None:
    assert list(list_letters(ast.parse(source)))


@pytest.mark.parametrize("source", ['"EXP"', '"e"', '""', '"EE"', "E + P", '"an E"'])
def test_what_is_not(source: str) -> None:
    assert not list(list_letters(ast.parse(source)))


def test_the_cores_name_no_encoder_and_no_kind_of_features() -> None:
    """They ask which kind the features of a medium have. ``messages`` has one as the default of a message's field."""
    for path in sorted((SOURCES / "core").rglob("*.py")):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "ENCODE" not in names, path
        assert "IMAGE" not in names or path.name == "messages.py", path
