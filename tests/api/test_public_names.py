"""`import trinity`: quick, without torch, and every public name where the type checker believes it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import trinity
from trinity.errors import DISTRIBUTION

HEAVY = ["torch", "transformers", "numpy", "anyio", "asyncio", "PIL", "msgspec"]
SOURCE = Path(trinity.__file__).read_text(encoding="utf-8")


def fresh(program: str) -> str:
    """What a fresh interpreter prints; a liveness bound of ten times the half second that the import may take."""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return run.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    program = f"""
import time
began = time.process_time()
import trinity, sys
spent = time.process_time() - began
print(sorted(set({HEAVY!r}) & set(sys.modules)), spent < 5)
"""
    assert fresh(program) == "[] True"


def test_values_of_the_cores_load_without_torch() -> None:
    program = "import trinity, sys; trinity.Request('x'); trinity.Placement; print('torch' in sys.modules)"
    assert fresh(program) == "False"


@pytest.mark.parametrize("name", trinity.__all__)
def test_each_public_name_is_there(name: str) -> None:
    value = getattr(trinity, name)
    assert getattr(trinity, name) is value
    assert name in dir(trinity)
    assert value.__doc__


@pytest.mark.parametrize("name", trinity.__all__)
def test_each_public_class_says_what_it_takes(name: str) -> None:
    """An editor, help() and the reference ask so; a name that is imported for the type checker alone would raise."""
    value = getattr(trinity, name)
    if inspect.isroutine(value) or (inspect.isclass(value) and not issubclass(value, BaseException)):
        assert inspect.signature(value)


def test_the_type_checker_sees_the_same_names() -> None:
    typed: dict[str, str | None] = {}
    for block in ast.parse(SOURCE).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for line in block.body:
                assert isinstance(line, ast.ImportFrom)
                typed |= {str(alias.asname): line.module for alias in line.names}
    assert typed == {name: f"trinity.{home}" for name, home in trinity._HOME.items()}


def test_a_name_of_a_subclass_is_the_class_itself() -> None:
    for name, home in trinity._HOME.items():
        assert getattr(trinity, name) is getattr(importlib.import_module(f"trinity.{home}"), name)


def test_an_unknown_name_is_refused_with_a_near_one() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        trinity.Pipelin  # type: ignore[attr-defined] # noqa: B018
    program = "import trinity; trinity.Pipelin"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Did you mean: 'Pipeline'" in run.stderr


def test_the_installed_version_is_the_sources() -> None:
    assert version(DISTRIBUTION) == trinity.__version__
