"""The frame itself: what a fresh clone offers, and what CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from support.paths import BINARY, ROOT
from tools import check_docs, check_imports
from trinity.memory import native

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
TARGETS = ["setup", "demo", "test", "test-all", "check", "bench", "docs", "mutants"]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~; \[]", name)[0]).lower()


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target_and_what_it_runs_is_there(target: str) -> None:
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for script in re.findall(r"\b((?:tools|examples|benchmarks)/[\w/]+\.py)", run.stdout):
        assert (ROOT / script).is_file(), f"make {target} runs {script}, which is not there"


@pytest.mark.parametrize("file", ["Makefile", ".github/workflows/release.yml"])
def test_what_is_asked_of_the_native_code_is_there(file: str) -> None:
    """No type checker sees the names in a line of make or of a workflow."""
    names = set(re.findall(r"\b(?:native|n)\.([a-z_]+)\(", (ROOT / file).read_text(encoding="utf-8")))
    assert names >= {"has_extension", "describe"}
    assert [name for name in names if not hasattr(native, name)] == []


@pytest.mark.parametrize("target", TARGETS[1:])
def test_each_target_does_its_own_set_up(target: str) -> None:
    assert re.search(rf"^{target}: \$\(STAMP\)", MAKEFILE, re.MULTILINE)


def set_up(root: Path, answer: str) -> bool:
    """Whether `make setup` would install, where the environment's interpreter answers so to whose it is."""
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    (root / ".venv" / ".setup").touch()
    run = subprocess.run(["make", "-n", "setup"], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return "pip install" in run.stdout


@pytest.mark.parametrize(("answer", "installs"), [("echo True", False), ("echo False", True), ("exit 1", True)])
def test_an_environment_that_is_broken_or_of_another_checkout_is_set_up_anew(
    answer: str, installs: bool, tmp_path: Path
) -> None:
    assert set_up(tmp_path, answer) is installs


def test_an_environment_older_than_its_pins_is_set_up_anew(tmp_path: Path) -> None:
    assert not set_up(tmp_path, "echo True")
    os.utime(tmp_path / ".venv" / ".setup", (0, 0))
    run = subprocess.run(["make", "-n", "setup"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "pip install" in run.stdout


def test_ci_calls_check_and_test_and_nothing_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make")] == ["make check", "make test"]
    assert len(lines) <= 6
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_direct_dependencies_are_pinned_within_their_bounds() -> None:
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    direct = [
        *PROJECT["project"]["dependencies"],
        *groups["dev"],
        *extras["plan"],
        *extras["plot"],
        *extras["server"],
        *extras["structured"],
        "pip",
    ]
    pinned = {plain(line): line.partition("==")[2] for line in PINS.splitlines() if "==" in line}
    assert [name for name in map(plain, direct) if name not in pinned] == []
    assert pinned["torch"] == "2.13.0"


def test_the_extras_asked_for_are_there() -> None:
    extras = {
        "audio",
        "cuda",
        "nixl",
        "otel",
        "plan",
        "plot",
        "quantised",
        "ray",
        "server",
        "structured",
        "ucx",
        "video",
    }
    assert set(PROJECT["project"]["optional-dependencies"]) == extras
    assert set(PROJECT["dependency-groups"]) == {"dev", "ends"}


IMPORTED = {  # names of modules that are not their distribution's, or of what imports it for us
    "accelerate": "transformers",
    "bitsandbytes": "transformers",
    "httptools": "uvicorn.protocols.http.httptools_impl",
    "opentelemetry_api": "opentelemetry",
}


def test_an_extra_installs_what_the_code_imports() -> None:
    imported = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for extra, needs in PROJECT["project"]["optional-dependencies"].items():
        for name in (plain(need).removesuffix("-cu13").replace("-", "_") for need in needs):
            module = IMPORTED.get(name, name)
            pattern = rf"(import|from) {module}\b|(_?import|import_module|find_spec)\(\"{module}(_cu13)?[\".]"
            assert re.search(pattern, imported), f"nothing imports {name} of the extra {extra}"


def test_set_up_has_a_pip_that_knows_groups_before_it_names_one() -> None:
    command = ["make", "-n", "-W", "pyproject.toml", "setup"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    lines = [line for line in run.stdout.splitlines() if "pip install" in line]
    first = next(index for index, line in enumerate(lines) if "--group dev" in line)
    assert lines[first - 1].endswith("'pip>=25.1'")
    assert all("-c constraints.txt" in line for line in lines)


def test_one_model_is_shipped_and_no_other_weights() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    weights = [name for name in listed.stdout.splitlines() if re.search(r"\.(safetensors|gguf|bin|pt|npz)$", name)]
    assert weights == ["src/trinity/demo/shapes/model.safetensors"]


def test_no_file_names_a_registry_or_a_machine_path() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    hosts = "|".join(["py" + r"pi\.org", r"pythonhosted\.org", r"download\.pytorch", "/wo" + "rk/", "/ro" + "ot/"])
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).suffix not in BINARY and (ROOT / name).is_file():
            assert not re.search(hosts, (ROOT / name).read_text(encoding="utf-8")), name


def test_strict_pytest() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"] == ["error"]
    assert options["timeout"] <= 600
    assert {"--strict-markers", "--strict-config"} <= set(options["addopts"])


def test_documents_link_to_what_is_there_and_name_what_is_there() -> None:
    assert check_docs.problems(ROOT) == []


@pytest.mark.slow  # make check runs it too
def test_imports_keep_to_their_layers() -> None:
    assert check_imports.main(ROOT / "src") == 0


def test_photographs_are_small_real_and_licensed() -> None:
    photos = sorted((ROOT / "examples" / "photos").glob("*.jpg"))
    licences = (ROOT / "examples" / "photos" / "LICENSES.md").read_text(encoding="utf-8")
    assert len(photos) >= 3
    for photo in photos:
        assert f"`{photo.name}`" in licences
        assert photo.stat().st_size < 64_000
        with Image.open(photo) as image:
            assert max(image.size) <= 640
            assert len(set(image.resize((64, 64)).get_flattened_data())) > 1000  # a photograph, no drawing


def test_entry_points_of_all_six_kinds() -> None:
    groups = PROJECT["project"]["entry-points"]
    kinds = {"transports", "models", "stages", "routing", "logits_processors", "media_kinds"}
    assert set(groups) == {f"trinity.{kind}" for kind in kinds}
    assert groups["trinity.transports"]["inproc"] == "trinity.transport.inproc:InprocTransport"
