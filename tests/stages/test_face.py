"""The face of ``trinity.stages``: all names for extensions, loaded on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trinity
from trinity import stages
from trinity.core import messages
from trinity.stages import base, encode, language
from trinity.stages.attention import interface

LIGHT = """
import sys
import trinity.stages
heavy = {"torch", "numpy", "transformers"} & set(sys.modules)
assert not heavy, heavy
trinity.stages.Step, trinity.stages.Stage
assert "torch" not in sys.modules
trinity.stages.PagedRows
assert "torch" in sys.modules
"""


@pytest.mark.parametrize("name", stages.__all__)
def test_every_name_loads_and_is_the_one_of_its_home(name: str) -> None:
    found = getattr(stages, name)
    homes = [home for home in (messages, base, interface, encode, language) if hasattr(home, name)]
    assert homes
    assert all(getattr(home, name) is found for home in homes)


def test_importing_the_face_imports_neither_torch_nor_numpy() -> None:
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_what_an_extension_needs_is_there() -> None:
    needed = {"Stage", "StageSetup", "StageFactory", "Step", "Encode", "Sampled", "IMAGE", "KV", "AttentionBackend"}
    assert needed <= set(stages.__all__) <= set(dir(stages))
    assert trinity.Stage is stages.Stage


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'trinity\.stages' has no attribute 'Stag'"):
        stages.Stag  # type: ignore[attr-defined]  # noqa: B018
