"""What is published, and what is said of it: name, licence, citation, commands, the figures of the security page."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import trinity
from support.paths import BINARY, ROOT
from tools import dependency_ends
from trinity.errors import DISTRIBUTION, pip_install
from trinity.pipeline import Pipeline
from trinity.preprocess.media_limits import MediaLimits
from trinity.remote.channel import channel, handshake, listener
from trinity.remote.channel.channel import SHORTEST_SECRET

SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, TOOLS = SETTINGS["project"], SETTINGS["tool"]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ANOTHERS = re.compile(r"pip install [^`\n]*?(?<![-\w./])trinity(?![-\w./])|(?<![-\w.])trinity\\?\[\w+\\?\]")


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file that git knows, but for this one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    for path in map(ROOT.__truediv__, filter(None, listed.stdout.split("\0"))):
        if path.suffix not in BINARY and path.is_file() and path != Path(__file__).resolve():
            yield path, path.read_text(encoding="utf-8")


def test_the_name_in_messages_is_the_name_that_is_published() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert pip_install("plot") == "pip install 'trinity-epd[plot]'"


@pytest.mark.parametrize("wrong", ["pip install trinity", "pip install -U 'trinity[plot]'", r"'trinity\[cuda\]'"])
def test_the_name_of_another_project_is_found_where_it_stands(wrong: str) -> None:
    assert ANOTHERS.search(f"it is missing: {wrong}")


@pytest.mark.parametrize("right", ["pip install 'trinity-epd[plot]'", "pip install ./trinity", "import trinity"])
def test_ours_is_not_taken_for_it(right: str) -> None:
    assert not ANOTHERS.search(f"it is missing: {right}")


def test_no_text_tells_anybody_to_install_another_project() -> None:
    assert [path for path, text in texts() if ANOTHERS.search(text)] == []


def test_every_extra_that_a_message_names_is_there() -> None:
    named = {extra for path, text in texts() for extra in re.findall(r"pip_install\(['\"](\w+)['\"]\)", text)}
    named |= {extra for path, text in texts() for extra in re.findall(rf"{DISTRIBUTION}\\?\[(\w+)\\?\]", text)}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"cuda", "plan", "plot"} <= named


def test_the_licence_is_apaches_and_whole() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert licence.split("\n")[:2] == [" " * 33 + "Apache License", " " * 27 + "Version 2.0, January 2004"]
    assert [int(number) for number in re.findall(r"^   (\d)\. ", licence, re.MULTILINE)] == list(range(1, 10))
    assert "END OF TERMS AND CONDITIONS" in licence


def test_licences_of_others_travel_along() -> None:
    assert all((ROOT / name).is_file() for name in PROJECT["license-files"])
    assert "src/trinity/traces/data/LICENSE.Apache-2.0" in PROJECT["license-files"]
    compiled = (ROOT / "csrc" / "LICENSES.md").read_text(encoding="utf-8")
    assert "NB_STATIC" in (ROOT / "csrc" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert "Copyright (c) 2022 Wenzel Jakob" in compiled  # nanobind asks for it wherever its code goes
    assert "Copyright (c) 2017 Thibaut Goetghebuer-Planchon" in compiled


def test_the_citation_agrees_with_the_package() -> None:
    cited = importlib.import_module("yaml").safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == trinity.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"]
    assert (cited["cff-version"], cited["type"], cited["title"]) == ("1.2.0", "software", trinity.__name__)
    assert cited["message"]


@pytest.mark.parametrize(("command", "target"), PROJECT["scripts"].items())
def test_a_command_runs_what_is_there(command: str, target: str) -> None:
    assert command == "trinity" or command.startswith("trinity-")
    assert callable(EntryPoint(command, target, "console_scripts").load())


LIMITS = MediaLimits()


@pytest.mark.parametrize(
    "said",
    [
        f"| images | {LIMITS.max_images} (`max_images`), each of {LIMITS.max_image_bytes >> 20} MiB as a file",
        f"{LIMITS.max_pixels // 10**6} million pixels decoded (`max_pixels`)",
        f"A message has at most {channel.MAX_MESSAGE >> 30} GiB (`MAX_MESSAGE`)",
        f"in frames of {channel.MAX_FRAME >> 20} MiB (`MAX_FRAME`), a hello has {channel.MAX_HELLO >> 20} MiB",
        f"of at least {SHORTEST_SECRET} characters",
        f"are at most {listener.MAX_UNAUTHENTICATED} at once (`MAX_UNAUTHENTICATED`)",
        f"(BLAKE2b, {8 * handshake.TAG} bits)",
    ],
)
def test_the_security_page_has_the_figures_of_the_code(said: str) -> None:
    assert said in " ".join(SECURITY.split())


def test_the_security_page_says_what_is_so_by_default() -> None:
    settings = {name: each.default for name, each in signature(Pipeline).parameters.items()}
    assert (settings["hosting"], settings["connector"]) == ("thread", None)
    assert not LIMITS.allow_urls
    assert channel.TIMEOUT_S == 10
    assert "It has ten seconds (`TIMEOUT_S`)" in SECURITY
    assert f"{settings['max_waiting']:,} (`Pipeline(max_waiting=)`)" in SECURITY
    assert (
        f"{settings['max_waiting_bytes'] >> 30} GiB of media that are prepared or wait (`max_waiting_bytes=`)"
        in SECURITY
    )


def test_no_code_of_a_checkpoint_is_asked_for() -> None:
    said = [text for path, text in texts() if path.is_relative_to(ROOT / "src") and "trust_remote_code" in text]
    assert not any("trust_remote_code" in text.replace("trust_remote_code=False", "") for text in said)


# ---------------------------------------------------------------- the release workflow, which cannot run here

RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
JOBS: dict[str, Any] = importlib.import_module("yaml").safe_load(RELEASE)["jobs"]


def test_nothing_is_published_but_by_a_tag_after_every_other_job() -> None:
    assert JOBS["publish"]["if"] == "github.ref_type == 'tag'"
    assert {"publish", *JOBS["publish"]["needs"]} == set(JOBS)


def test_only_what_publishes_may_prove_who_it_is_and_no_password_is_kept() -> None:
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert "\npermissions:\n  contents: read\n" in RELEASE
    assert "secrets." not in RELEASE


def test_every_version_that_gets_a_wheel_is_tried_and_no_other_is_promised() -> None:
    tried = JOBS["try"]["strategy"]["matrix"]["python"]
    built = TOOLS["cibuildwheel"]["build"].removeprefix("cp3{").removesuffix("}-manylinux_x86_64")
    assert tried == [f"3.{minor}" for minor in built.split(",")]
    promised = {line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert promised <= set(tried)


def test_a_wheel_for_others_carries_nothing_of_nvidias() -> None:
    assert "CUDA" not in (ROOT / "csrc" / "CMakeLists.txt").read_text(), "kernels for GPUs are Triton's"


def test_the_tag_is_held_against_the_version_where_it_stands() -> None:
    (check,) = (step["run"] for step in JOBS["plain"]["steps"] if step.get("name") == "The tag is the version")
    for tag, code in ((f"v{trinity.__version__}", 0), ("v9.9", 1)):
        run = subprocess.run(["bash", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, timeout=60)
        assert run.returncode == code


# ---------------------------------------------------------------- every workflow

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit_with_their_version(path: Path) -> None:
    """A tag can be moved to other code, a commit cannot."""
    used = re.findall(r"^.*\buses:.*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    assert [line for line in used if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\b", line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_what_it_runs_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert importlib.import_module("yaml").safe_load(text)["permissions"] == {"contents": "read"}
    for name in re.findall(r"(?<![\w./-])((?:tools|tests)(?:/[\w.]+)+)", text):
        assert (ROOT / name).exists(), f"{path.name} runs {name}, which is not there"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"run: make ([\w-]+)", text):
        assert f"\n{target}: " in makefile, f"{path.name} makes {target}, which no Makefile knows"


def test_every_push_and_pull_request_is_checked_and_tested_at_both_ends() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    flow = importlib.import_module("yaml").load(text, importlib.import_module("yaml").BaseLoader)
    assert set(flow["on"]) == {"push", "pull_request"}
    ran = {step["run"] for job in flow["jobs"].values() for step in job["steps"] if "run" in step}
    assert {"make check", "make test"} <= ran
    assert [each["end"] for each in flow["jobs"]["ends"]["strategy"]["matrix"]["include"]] == ["lowest", "newest"]
    extras = f".[{','.join(dependency_ends.EXTRAS)}]"
    assert any(extras in each for each in ran)
    assert extras in (ROOT / "Makefile").read_text(encoding="utf-8"), "as make setup installs"


def test_the_lowest_versions_are_the_lower_ends_of_all_ranges() -> None:
    asked = ["one>=1.2,<3", "two[x]>=0.5; sys_platform == 'linux'", "three-four <2, >=1.0.1"]
    assert list(dependency_ends.list_lowest(asked)) == ["one==1.2", "two==0.5", "three-four==1.0.1"]
    with pytest.raises(SystemExit, match=r"'five' in pyproject.toml has no lower end"):
        list(dependency_ends.list_lowest(["five"]))
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "dependency_ends.py"), "lowest"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(found) == len(dependency_ends.read_requirements())
    assert {
        f"transformers=={each}" for each in re.findall(r"transformers>=([\d.]+)", str(PROJECT["dependencies"]))
    } <= set(found)
