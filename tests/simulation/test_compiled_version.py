"""An extension of other sources is refused by its number, which cannot stay when the sources change.

Unit: trinity.simulation.compiled_engine.why_unavailable and SIMULATOR of csrc/simulation/bind.cpp.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity.simulation import compiled_engine

SOURCES = Path(__file__).parents[2] / "csrc" / "simulation"
# The number, and the sources that it stands for. Where these change, raise SIMULATOR in csrc/simulation/bind.cpp and in
# simulation/compiled_engine.py and write both here: an extension built before takes other rows or answers otherwise.
VERSION = (5, "91e58173edbd82a4")


def digest_of(sources: Path) -> str:
    """Compute a digest of the code in ``sources``, without comments, layout and the number itself."""
    found = hashlib.sha256()
    for path in sorted(sources.glob("*.?pp")):
        code = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        code = re.sub(r'attr\("SIMULATOR"\) = \d+', "", code)
        found.update(path.name.encode() + "".join(code.split()).encode())
    return found.hexdigest()[:16]


def number_in(sources: Path) -> int:
    found = re.search(r'attr\("SIMULATOR"\) = (\d+);', (sources / "bind.cpp").read_text(encoding="utf-8"))
    assert found
    return int(found[1])


def copy_sources(into: Path) -> Path:
    for path in SOURCES.glob("*.?pp"):
        (into / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return into


def test_the_number_changes_with_the_sources() -> None:
    assert (compiled_engine.SIMULATOR, digest_of(SOURCES)) == VERSION, "raise SIMULATOR: see VERSION in this file"
    assert number_in(SOURCES) == compiled_engine.SIMULATOR


def test_a_change_of_what_it_takes_is_seen_and_a_comment_is_not(tmp_path: Path) -> None:
    bind = copy_sources(tmp_path) / "bind.cpp"
    text = bind.read_text(encoding="utf-8")
    bind.write_text("// as it was\n" + text.replace("    ", "  "), encoding="utf-8")
    assert digest_of(tmp_path) == digest_of(SOURCES)
    changed = re.sub(r"whole\.size\(\) == \d+", "whole.size() == 18", text)
    assert changed != text
    bind.write_text(changed, encoding="utf-8")
    assert digest_of(tmp_path) != digest_of(SOURCES)


@pytest.mark.parametrize("built", [SimpleNamespace(), SimpleNamespace(SIMULATOR=compiled_engine.SIMULATOR - 1)])
def test_an_extension_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, built: SimpleNamespace) -> None:
    monkeypatch.setattr(compiled_engine, "extension", built)
    assert "was built from other sources" in compiled_engine.why_unavailable()
    assert "install trinity again" in compiled_engine.why_unavailable()
