"""Logits processors by name: of this process, of packages, and of nobody."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from trinity import plugins
from trinity.core import logits_processors
from trinity.core.logits_processors import find_logits_processor, register_logits_processor
from trinity.errors import ConfigError, UnknownName


def unchanged(prompt: Any, outputs: Any, logits: Any) -> Any:
    return logits


NOT_CALLABLE = 7


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed, and no name that another test has left."""
    entries = [
        EntryPoint("theirs", f"{__name__}:unchanged", "trinity.logits_processors"),
        EntryPoint("number", f"{__name__}:NOT_CALLABLE", "trinity.logits_processors"),
        EntryPoint("gone", "no_such_module:thing", "trinity.logits_processors"),
    ]

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry for entry in entries if entry.group == group and name in (None, entry.name)]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(logits_processors, "_loaded", {})
    monkeypatch.setattr(logits_processors, "_registered", {})
    return


def test_a_name_of_this_process_is_known_until_it_is_forgotten() -> None:
    register_logits_processor("mine", unchanged)
    assert find_logits_processor("mine") is unchanged
    register_logits_processor("mine", None)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match=r"unknown logits processor 'mine'; known: gone, number, theirs"):
        find_logits_processor("mine")


def test_instances_in_processes_know_those_of_packages_alone() -> None:
    register_logits_processor("mine", unchanged)
    assert find_logits_processor("theirs", registered=False).__name__ == "unchanged"
    with pytest.raises(UnknownName, match=r"known: gone, number, theirs\. .*instances in processes know no others"):
        find_logits_processor("mine", registered=False)


@pytest.mark.parametrize("name", ["number", "gone"])
def test_what_cannot_be_called_or_loaded_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        find_logits_processor(name)


@pytest.mark.parametrize("given", [("", unchanged), (7, unchanged), ("mine", 7)])
def test_what_is_no_name_or_no_function_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        register_logits_processor(*given)
