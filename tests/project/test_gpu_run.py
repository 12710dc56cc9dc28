"""The GPU run without a GPU: what it collects on a machine that has little, its contexts, and the bundle it carries."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.paths import ROOT
from tools import gpu_bundle, gpu_tests

THERE = {"pytest", "pytest-asyncio", "pyyaml", "tokenizers", "triton"}  # of what tests need
NAME = re.compile(r"[\w.-]+")


def run(path: list[Path], *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these folders for modules, and none of its own."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    return subprocess.run([sys.executable, "-S", *arguments], cwd=cwd, env=given, capture_output=True, text=True)


# ------------------------------------------------------------ what is collected


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a machine with a GPU: links to those here, without what only developers have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [*project["dependency-groups"]["dev"], *extras["plan"], *extras["plot"], *extras["nixl"], *extras["ucx"]]
    absent = {match[0] for each in asked if (match := NAME.match(each))} - THERE | {"execnet"}
    hidden = set()
    for name in absent:
        try:
            hidden |= {Path(file).parts[0] for file in importlib.metadata.files(name) or ()}
        except importlib.metadata.PackageNotFoundError:
            continue
    folder = tmp_path_factory.mktemp("foreign")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in hidden and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    assert "hypothesis" in hidden
    assert {"xdist", "simpy", "nbformat", "pytest_timeout.py"} <= hidden
    return folder


def test_it_collects_and_runs_where_developers_packages_are_missing(foreign: Path) -> None:
    """Every file is imported; of its tests a plain one runs, and one that draws examples says what it lacks."""
    wanted = "splits_keep_the_processors or equals_dense or auto_takes or two_processes_on_a_gpu or a_gpu_does_the_same"
    done = run([foreign, ROOT / "src"], "tools/gpu_tests.py", "-k", wanted, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU: torch" in done.stdout.splitlines()[0]
    assert re.search(r"\b1 passed, \d+ skipped, \d+ deselected", done.stdout), done.stdout
    assert "hypothesis is not installed" in done.stdout
    for name in ("test_on_gpu", "test_cuda_ipc", "test_native"):
        assert f"{name}.py" in done.stdout, f"{name} has no test for GPUs that is skipped here"


def test_files_are_found_by_their_marker(tmp_path: Path) -> None:
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    texts = {
        "test_a.py": "@pytest.mark.gpu\ndef test_a(): ...",
        "test_b.py": "pytestmark = [\n    pytest.mark.gpu,\n]",
        "test_c.py": "pytestmark = pytest.mark.gpu",
        "test_d.py": "def test_d(): 'pytest.mark.gpu'",
        "helper.py": "pytestmark = pytest.mark.gpu",
    }
    for name, text in texts.items():
        (tmp_path / "tests" / "deep" / name).write_text(text)
    assert [path.name for path in gpu_tests.find_gpu_files(tmp_path)] == ["test_a.py", "test_b.py", "test_c.py"]
    assert gpu_tests.make_arguments(["-x"], tmp_path)[-2:] == ["tests/deep/test_c.py", "-x"]
    one = "tests/deep/test_a.py::test_a"
    assert [each for each in gpu_tests.make_arguments([one], tmp_path) if "test_" in each] == [one]


def test_this_project_has_such_files() -> None:
    found = {path.name for path in gpu_tests.find_gpu_files()}
    assert {"test_on_gpu.py", "test_attention_triton.py", "test_cuda_ipc.py", "test_native.py"} <= found
    assert Path(__file__).name not in found


def test_what_is_missing_is_named() -> None:
    done = run([ROOT / "src"], "tools/gpu_tests.py")
    assert done.returncode == 1
    assert "msgspec, " in done.stderr
    assert "make gpu-bundle" in done.stderr


# ------------------------------------------------------------ a GPU that a stand-in shows


TORCH = """
import os
from unittest.mock import MagicMock

cuda, opened = MagicMock(), []
cuda.is_available.return_value, cuda.device_count.return_value = True, 1

def ones(*shape, **where):
    if not opened:
        opened.extend(os.pipe())  # as a context opens some
    return MagicMock()

def get_num_threads():
    return 1
"""
FIRST_USE = """
import pytest
import torch

@{marker}
def test_first_use():
    torch.ones(1)
"""


@pytest.fixture
def machine(tmp_path: Path) -> list[Path]:
    """Where torch sees a GPU, and the driver shows nothing in /proc."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    return [tmp_path, ROOT / "tests", ROOT / "src", Path(sysconfig.get_path("purelib"))]


def interpreted(machine: list[Path], **environment: str) -> str:
    script = "import os, conftest; print(os.environ.get('TRITON_INTERPRET', 'compiled'))"
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": os.pathsep.join(map(str, machine)), **environment}
    if "CUDA_VISIBLE_DEVICES" not in environment:
        given.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-S", "-c", script], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="there is an NVIDIA driver here, which shows itself")
def test_kernels_are_compiled_wherever_torch_sees_a_gpu(machine: list[Path]) -> None:
    assert interpreted(machine) == "compiled"
    assert interpreted(machine, CUDA_VISIBLE_DEVICES="") == "1"


def test_contexts_are_made_before_the_leak_guard_looks(machine: list[Path], tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST_USE.format(marker="pytest.mark.gpu"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    options = ("-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_first.py")
    done = run(machine, *options, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


# ------------------------------------------------------------ the bundle


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No network: each wheel that is asked for has one module of a kilobyte."""
    asked: list[str] = []

    def download(names: list[str], python: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in names:
            asked.append(f"{name} for {python}")
            with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}.py", "#" * 1024)

    monkeypatch.setattr(gpu_bundle, "download", download)
    return asked


def test_a_bundle_has_unpacked_wheels_and_a_script(wheels: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "build" / "gpu-bundle"
    size = gpu_bundle.pack(["one", "two"], "3.12", folder)
    assert wheels == ["one for 3.12", "two for 3.12"]
    assert sorted(path.name for path in (folder / "site").iterdir()) == ["one.py", "two.py"]
    assert not (folder / "wheels").exists()
    assert 2048 < size < 8192


def test_a_bundle_that_is_too_large_is_not_made(wheels: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="at most 0"):
        gpu_bundle.pack(["one"], "3.12", tmp_path / "bundle", most=1000)
    assert not (tmp_path / "bundle").exists()


def test_its_script_runs_the_tests_with_what_it_carries(wheels: list[str], tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "gpu_tests.py").write_text("import one, sys; print(one.__file__, sys.argv[1:])")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "build" / "gpu-bundle"
    gpu_bundle.pack(["one"], version, folder)

    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", str(folder / "run.sh"), *arguments]
        return subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)

    done = script("tests", "-k", "one two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{folder}/site/one.py ['-k', 'one two']"
    assert script("nonsense").returncode == 2
    gpu_bundle.write_script(folder, "3.4")
    assert "packed for Python 3.4: 3." in script("tests").stderr


def test_its_script_makes_a_cache_of_carried_kernels(wheels: list[str], tmp_path: Path) -> None:
    """Triton finds a kernel's parts by absolute paths, so they are written where it runs, each time."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "gpu_bundle.py", tmp_path / "tools")
    (tmp_path / "tools" / "gpu_tests.py").write_text("import os; print(os.environ['TRITON_CACHE_DIR'])")
    carried = tmp_path / "build" / "gpu-bundle" / "triton" / "KEY"
    gpu_bundle.pack(["one"], f"{sys.version_info.major}.{sys.version_info.minor}", carried.parent.parent)
    carried.mkdir(parents=True)
    for name in ("attend.json", "attend.cubin", "__grp__attend.json"):
        (carried / name).write_text("of the machine that compiled it")
    command = ["sh", str(carried.parent.parent / "run.sh"), "tests"]
    for _ in range(2):
        done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, str(carried.parent)), done.stderr
        group = json.loads((carried / "__grp__attend.json").read_text())
        assert group == {"child_paths": {name: str(carried / name) for name in ("attend.json", "attend.cubin")}}
    assert len(list(carried.iterdir())) == 3


def test_kernels_are_compiled_by_a_python_with_the_machines_versions(
    wheels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as part of the bundle; no setting of Triton's here gets into what it looks kernels up by."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$2"; env > "$2/env"; head -c 9000 /dev/zero > "$2/k.cubin"\n')
    python.chmod(0o755)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    size = gpu_bundle.pack(["one"], "3.12", tmp_path / "bundle", compiler=python)
    assert 10_000 < size < 30_000
    told = dict(line.partition("=")[::2] for line in (tmp_path / "bundle" / "triton" / "env").read_text().splitlines())
    assert [name for name in told if name.startswith("TRITON_")] == ["TRITON_CACHE_DIR"]
    assert told["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "bundle" / "site")
    with pytest.raises(SystemExit, match="at most 0"):
        gpu_bundle.pack(["one"], "3.12", tmp_path / "bundle", most=9000, compiler=python)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"no python3.12 is here to compile kernels with: give --compiler"):
        gpu_bundle.make_compiler("3.12", tmp_path / "none")


def test_the_bundle_has_what_the_tests_need_and_no_compiled_torch() -> None:
    distributions = {"pytest_asyncio": "pytest-asyncio", "PIL": "pillow"}
    brought = {distributions.get(name, name) for name in gpu_tests.NEEDED} - {
        "torch",
        "transformers",
        "triton",
        "pillow",
    }
    assert brought <= set(gpu_bundle.NAMES)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert [name for name in gpu_bundle.NAMES if f"\n{name.replace('_', '-')}==" not in pinned] == []
