"""The checks of `make check`, each shown to fail on what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_imports, check_sizes


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def sizes(root: Path) -> list[str]:
    return check_sizes.report(root)[1]


def test_sizes_at_their_limits_pass(tmp_path: Path) -> None:
    source = function("long", 90) + "\n" * 400 + function("small", 7)
    write(tmp_path, {"src/a.py": source, "src/b.py": function("small", 8), "tests/t.py": "x = 1\n\n" * 105})
    assert sizes(tmp_path) == []
    assert check_sizes.main(tmp_path) == 0


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"src/a.py": function("f", 9)}, "median function has 9 lines"),
        ({"src/a.py": "x = 1\ny = 1\n", "tests/test_a.py": "x = 1\n\n\n"}, "1 lines for 2 lines of code"),
    ],
)
def test_a_size_beyond_its_limit_is_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    assert any(problem in line for line in sizes(write(tmp_path, files)))
    assert check_sizes.main(tmp_path) == 1


def imported(root: Path, files: dict[str, str]) -> list[str]:
    write(root, {"trinity/__init__.py": "", **{f"trinity/{name}": text for name, text in files.items()}})
    found = check_imports.modules(root)
    around = check_imports.cycle(found)
    return [*check_imports.impure(found), *check_imports.roundabout(found), *check_imports.apart(found), *around]


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
    "files",
    [
        {"a.py": "from trinity.b import x", "b.py": "from trinity.a import y"},
        {"a.py": "import trinity.b", "b.py": "def f():\n    from trinity import a"},
        {"a.py": "from trinity.b import x", "b.py": "from trinity.c import x", "c.py": "from trinity.a import x"},
        {"p/__init__.py": "from trinity.p.q import x", "p/q.py": "from trinity.p import y"},
        {"a.py": "import_module('trinity.b')", "b.py": "import trinity.a as a"},
    ],
)
def test_a_cycle_is_found_lazy_or_not(tmp_path: Path, files: dict[str, str]) -> None:
    assert imported(tmp_path, files)


def test_no_cycle_is_seen_where_there_is_none(tmp_path: Path) -> None:
    package = {"p/__init__.py": "from trinity.p.q import x", "p/q.py": "from trinity.p.r import y", "p/r.py": ""}
    typed = {"a.py": "if TYPE_CHECKING:\n    from trinity.b import x", "b.py": "from trinity import a"}
    assert imported(tmp_path, package | typed) == []


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
