"""The checks of `make check`, each shown to fail on what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_imports


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def imported(root: Path, files: dict[str, str]) -> list[str]:
    write(root, {"trinity/__init__.py": "", **{f"trinity/{name}": text for name, text in files.items()}})
    found = check_imports.modules(root)
    return [*check_imports.impure(found), *check_imports.roundabout(found), *check_imports.apart(found)]


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "import torch.nn as nn",
        "from time import monotonic",
        "from asyncio import *",
        "def f():\n    import anyio",
        "def f():\n    return importlib.import_module('torch')",
        "torch = __import__('torch')",
        "if TYPE_CHECKING:\n    import torch",
        "try:\n    import uvloop\nexcept ImportError:\n    pass",
    ],
)
def test_a_core_that_knows_a_clock_a_tensor_or_a_loop_is_named(tmp_path: Path, line: str) -> None:
    assert len(imported(tmp_path, {"core/__init__.py": "", "core/step.py": line})) == 1
    assert "core/step.py" in imported(tmp_path, {"core/step.py": line})[0]


def test_a_shell_may_know_them(tmp_path: Path) -> None:
    assert imported(tmp_path, {"instance.py": "import time, torch, anyio", "core/__init__.py": "import timeit"}) == []


@pytest.mark.parametrize(
    "line", ["import trinity", "from trinity import Pipeline", "from . import b", "from .b import x"]
)
def test_modules_are_named_where_they_live(tmp_path: Path, line: str) -> None:
    assert "name the module" in imported(tmp_path, {"a.py": line, "b.py": ""})[0]


def test_stages_and_transport_stay_apart(tmp_path: Path) -> None:
    files = {
        "stages/a.py": "def f():\n    from trinity.transport.b import x",
        "transport/b.py": "import trinity.memory.block_memory",
    }
    assert "stages and transport" in imported(tmp_path, files | {"memory.py": ""})[0]


def test_a_package_without_its_init_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"trinity/__init__.py": "", "trinity/p/a.py": ""})
    assert check_imports.main(tmp_path) == 1
    assert "p: no __init__.py" in capsys.readouterr().out
    write(tmp_path, {"trinity/p/__init__.py": ""})
    assert check_imports.main(tmp_path) == 0
