"""What `pip install` makes: a wheel with everything in it, with the extension or without, and a checkout's own src/."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import trinity
from trinity.memory import native

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "trinity").rglob("*.py*")}
SHIPPED = {name for name in SOURCES if "__pycache__" not in name} | {"trinity/py.typed"}
DATA = ("servegen-image-1h.jsonl.gz", "servegen-image-24h.jsonl.gz", "ORIGIN.md", "LICENSE.Apache-2.0")
SHIPPED |= {f"trinity/traces/data/{name}" for name in DATA}


def wheel(folder: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel that `pip install .` would install; what builds it is here already, nothing is fetched."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed: make setup")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)],
        env={**os.environ, "CMAKE_ARGS": "-DTRINITY_CUDA=OFF", **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


def extensions(made: zipfile.ZipFile) -> list[str]:
    return [name for name in made.namelist() if name.startswith("trinity/_native.") and not name.endswith(".pyi")]


def check_contents(made: zipfile.ZipFile) -> None:
    assert set(made.namelist()) >= SHIPPED
    (metadata,) = (name for name in made.namelist() if name.endswith("dist-info/METADATA"))
    assert f"\nVersion: {trinity.__version__}\n" in made.read(metadata).decode()
    entry_points = made.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    for group, entries in PROJECT["project"]["entry-points"].items():
        assert not entries or f"[{group}]" in entry_points
        assert all(f"{name} = {what}" in entry_points for name, what in entries.items())


@pytest.mark.parametrize(("variable", "value"), [("CXX", "/no/such/compiler"), ("TRINITY_NATIVE", "0")])
def test_without_a_compiler_or_when_told_so_the_install_succeeds_without_the_extension(
    tmp_path: Path, variable: str, value: str
) -> None:
    with wheel(tmp_path, **{variable: value}) as made:
        assert extensions(made) == []
        check_contents(made)


@pytest.mark.slow
def test_a_wheel_has_the_extension_and_every_module(tmp_path: Path) -> None:
    if not native.has_extension():
        pytest.skip(native.describe())
    with wheel(tmp_path / "made") as made:
        assert len(extensions(made)) == 1
        check_contents(made)
        made.extractall(tmp_path / "site")
    script = "from trinity.memory import native; print(native.describe(), native.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("csrc (")
    assert str(tmp_path / "site") in run.stdout


def test_a_checkout_on_the_path_wins_over_the_installed_one(tmp_path: Path) -> None:
    """An editable install must be a plain line in a .pth file: an import hook would find its own checkout first."""
    (tmp_path / "trinity").mkdir()
    (tmp_path / "trinity" / "__init__.py").write_text("mine = True\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    script = "import trinity; assert trinity.mine"
    run = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert PROJECT["tool"]["scikit-build"]["editable"]["mode"] == "inplace"


def test_what_fails_to_build_is_built_without_the_extension() -> None:
    overrides = PROJECT["tool"]["scikit-build"]["overrides"]
    assert [each["wheel"]["cmake"] for each in overrides] == [False, False]
    assert {"failed", "env"} == {key for each in overrides for key in each["if"]}
