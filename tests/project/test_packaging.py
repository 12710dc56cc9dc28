"""What `pip install` makes: a wheel with everything in it, with the extension or without, and a checkout's own src/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import trinity
from support.document_server import ADDRESS, serving_as_told
from support.paths import ROOT
from support.thinned import thinned
from trinity.errors import DISTRIBUTION
from trinity.memory import native

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "trinity").rglob("*.py*")}
SHIPPED = {name for name in SOURCES if "__pycache__" not in name} | {"trinity/py.typed"}
DATA = ("servegen-image-1h.jsonl.gz", "servegen-image-24h.jsonl.gz", "ORIGIN.md", "LICENSE.Apache-2.0")
SHIPPED |= {f"trinity/traces/data/{name}" for name in DATA}
SHIPPED |= {f"trinity/demo/shapes/{path.name}" for path in (ROOT / "src" / "trinity" / "demo" / "shapes").iterdir()}
STABLE = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")


def pythons() -> list[str]:
    """This interpreter, and those of other versions that are at hand."""
    others = (shutil.which(f"python3.{minor}") for minor in range(11, 15) if minor != sys.version_info.minor)
    tried = [each for each in others if each and not subprocess.run([each, "-V"], capture_output=True).returncode]
    return [sys.executable, *tried]


def wheel(folder: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel that `pip install .` would install; what builds it is here already, nothing is fetched."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed: make setup")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made)


def extensions(made: zipfile.ZipFile) -> list[str]:
    return [name for name in made.namelist() if name.startswith("trinity/_native.") and not name.endswith(".pyi")]


def file_of(made: zipfile.ZipFile, name: str) -> str:
    (found,) = (each for each in made.namelist() if each.endswith(f".dist-info/{name}"))
    return made.read(found).decode()


def check_tag(made: zipfile.ZipFile) -> None:
    """Its name says what is in it, and so does its own account."""
    python, abi, platform = Path(str(made.filename)).stem.split("-")[2:]
    about, compiled = file_of(made, "WHEEL"), extensions(made)
    assert f"\nTag: {python}-{abi}-{platform}\n" in about
    assert f"\nRoot-Is-Purelib: {'false' if compiled else 'true'}\n" in about
    if not compiled:
        assert (python, abi, platform) == ("py3", "none", "any")
        return
    this = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert (python, abi) == (("cp312", "abi3") if STABLE else (this, this))
    assert [".abi3." in name for name in compiled] == [STABLE]
    assert platform == sysconfig.get_platform().replace("-", "_").replace(".", "_")


def check_contents(made: zipfile.ZipFile) -> None:
    assert set(made.namelist()) >= SHIPPED
    metadata = file_of(made, "METADATA")
    for line in (f"Name: {DISTRIBUTION}", f"Version: {trinity.__version__}", "License-Expression: Apache-2.0"):
        assert f"\n{line}\n" in metadata
    for licence in PROJECT["project"]["license-files"]:
        assert f"\nLicense-File: {licence}\n" in metadata
        assert file_of(made, f"licenses/{licence}") == (ROOT / licence).read_text(encoding="utf-8")
    entry_points = file_of(made, "entry_points.txt")
    assert all(f"{name} = {what}" in entry_points for name, what in PROJECT["project"]["scripts"].items())
    for group, entries in PROJECT["project"]["entry-points"].items():
        assert not entries or f"[{group}]" in entry_points
        assert all(f"{name} = {what}" in entry_points for name, what in entries.items())


@pytest.mark.parametrize(
    ("variable", "value"),
    thinned([("CXX", "/no/such/compiler"), ("TRINITY_NATIVE", "0")], lambda each: each[0] == "CXX"),
)
def test_without_a_compiler_or_when_told_so_the_install_succeeds_without_the_extension(
    tmp_path: Path, variable: str, value: str
) -> None:
    with wheel(tmp_path, **{variable: value}) as made:
        assert extensions(made) == []
        check_contents(made)
        check_tag(made)


@pytest.mark.slow
@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_a_wheel_that_compiled_nothing_installs_in_an_empty_environment(tmp_path: Path, python: str) -> None:
    with wheel(tmp_path / "made", TRINITY_NATIVE="0") as made:
        name = str(made.filename)
    subprocess.run([python, "-m", "venv", str(tmp_path / "empty")], check=True, timeout=60)
    programs = tmp_path / "empty" / "bin"
    interpreter = str(programs / "python")
    install = [interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", name]
    subprocess.run(install, check=True, timeout=60)
    assert all((programs / command).is_file() for command in PROJECT["project"]["scripts"])
    script = "import trinity, importlib.metadata as m; assert m.version('trinity-epd') == trinity.__version__"
    subprocess.run([interpreter, "-I", "-c", script], check=True, timeout=60)


@pytest.mark.slow
def test_an_installed_wheel_serves_the_shapes_model_as_the_first_page_says(tmp_path: Path) -> None:
    """No checkout, no compiler, no native code; what trinity needs is lent by this environment, trinity itself not."""
    with wheel(tmp_path / "made", TRINITY_NATIVE="0") as made:
        name = str(made.filename)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True, timeout=120)
    python = str(tmp_path / "empty" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", name], check=True, timeout=120)
    (packages,) = (tmp_path / "empty" / "lib").glob("python3*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    document = ROOT / "README.md"
    (block,) = re.findall(rf"^```python\n([^`]*{ADDRESS}.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S)
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with serving_as_told(document, [str(tmp_path / "empty" / "bin" / "trinity")], **environment) as address:
        ask = [python, "-c", block.replace(ADDRESS, address)]
        run = subprocess.run(ask, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout == " right of the red circle\n", run.stderr


@pytest.mark.slow
@pytest.mark.timeout(660)  # it compiles, for 45 seconds of one processor
def test_a_wheel_has_the_extension_and_every_module(tmp_path: Path) -> None:
    if not native.has_extension():
        pytest.skip(native.describe())
    with wheel(tmp_path / "made") as made:
        assert len(extensions(made)) == 1
        check_contents(made)
        check_tag(made)
        made.extractall(tmp_path / "site")
    script = "from trinity.memory import native; print(native.describe(), native.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("csrc (")
    assert str(tmp_path / "site") in run.stdout


def test_a_source_distribution_has_what_a_build_and_the_tests_need(tmp_path: Path) -> None:
    script = "import sys, scikit_build_core.build as backend; backend.build_sdist(sys.argv[1])"
    run = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(run, cwd=ROOT, check=True, timeout=60, stdout=subprocess.DEVNULL)
    (made,) = tmp_path.glob("trinity_epd-*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    wanted = {name for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).is_file()}
    assert wanted - names == set()
    assert [name for name in names if name.endswith(".so") or "/CMakeFiles/" in name] == []


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
    without = [each for each in overrides if each["wheel"] == {"cmake": False, "py-api": "py3"}]
    assert {"failed", "env"} == {key for each in without for key in each["if"]}
    assert not any("platlib" in each["wheel"] for each in overrides)
