"""Verdicts: kept by content, asked for at load, and never there for a proof that was not run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint import verdicts
from trinity.preprocess.checkpoint.libraries import library_version
from trinity.preprocess.checkpoint.verdicts import (
    MediaFacts,
    ProofPart,
    ProofVerdict,
    find_verdict,
    identify,
    keep_verdict,
    on_trial,
    require_facts,
)

PASSED = ProofVerdict(
    model_type="glm4v",
    parts=(ProofPart("logits", True, "1e-6 off"),),
    serves=("image", "text"),
    facts=MediaFacts(image_token_id=7, image_token="<image>"),
)
FAILED = ProofVerdict(model_type="glm4v", parts=(ProofPart("features", False, "4 rows are 0.5 off"),))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_known", {})
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def never(*given: Any, **named: Any) -> Any:
    pytest.fail("a process was started")


def test_a_verdict_is_found_by_others_and_is_of_these_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", never)
    keep_verdict(directory, PASSED)
    monkeypatch.setattr(verdicts, "_known", {})  # as another process
    assert find_verdict(directory) == PASSED
    assert require_facts(directory, "glm4v") == PASSED.facts
    (directory / "config.json").write_text('{"a": 1}')
    assert find_verdict(directory) is None


@pytest.mark.parametrize("library", ["transformers", "torchaudio", "mistral-common"])
def test_a_verdict_is_of_these_versions(library: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor asks for as well: a refusal for want of it ends once it is installed."""
    keep_verdict(directory, PASSED)
    other = {library: "0.1"}
    monkeypatch.setattr(verdicts, "library_version", lambda name: other.get(name) or library_version(name))
    assert find_verdict(directory) is None


def test_a_failed_proof_refuses_by_the_part_that_differed(directory: Path) -> None:
    keep_verdict(directory, FAILED)
    with pytest.raises(UnsupportedModel, match=r"'glm4v'.*the features differ.*4 rows are 0.5 off.*trinity\.check"):
        require_facts(directory, "glm4v")


def test_a_proof_that_proved_no_media_refuses(directory: Path) -> None:
    keep_verdict(directory, msgspec.structs.replace(PASSED, serves=()))
    with pytest.raises(UnsupportedModel, match="proved no media"):
        require_facts(directory, "glm4v")


def test_a_proof_that_ends_without_a_verdict_refuses_and_leaves_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "PROOF_MODULE", "trinity.no_such_module")
    with pytest.raises(UnsupportedModel, match=r"ended with code 1 and no verdict.*no_such_module"):
        require_facts(directory, "glm4v")
    assert find_verdict(directory) is None


def test_a_proof_that_takes_too_long_refuses(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "PROOF_MODULE", "timeit")
    monkeypatch.setattr(verdicts, "MOST_SECONDS", 0.01)
    with pytest.raises(UnsupportedModel, match=r"could not be run.*timed out"):
        require_facts(directory, "glm4v")
    assert find_verdict(directory) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model_type": 3}'])
def test_a_damaged_verdict_is_none(directory: Path, content: bytes) -> None:
    keep_verdict(directory, PASSED)
    verdicts._known.clear()
    verdicts._place(identify(directory)).write_bytes(content)
    assert find_verdict(directory) is None


def test_what_is_on_trial_is_loaded_with_its_facts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", never)
    facts = MediaFacts(image_token_id=3, image_token="<x>")
    with on_trial(directory, facts):
        assert require_facts(directory, "glm4v") == facts
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: subprocess.CompletedProcess([], 3, b"", b"no"))
    with pytest.raises(UnsupportedModel, match="code 3"):
        require_facts(directory, "glm4v")


@pytest.mark.slow
def test_the_first_that_asks_has_the_proof_run_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path / "cache"))
    directory = Path(shutil.copytree(checkpoint("any-qwen3_vl_moe"), tmp_path / "model"))
    facts = require_facts(directory, "glm4v")
    assert facts.image_token == "<image>"
    ran = subprocess.run(
        [sys.executable, "-m", "trinity.check", str(directory)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "qwen3_vl_moe serves: image, text" in ran.stdout
    kept = find_verdict(directory)
    assert kept is not None
    assert json.loads(msgspec.json.encode(kept))["serves"] == ["image", "text"]


ASKS = """
import sys
from pathlib import Path
from trinity.preprocess.checkpoint.verdicts import require_facts
require_facts(Path(sys.argv[1]), "glm4v")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a dead parent on Linux")
def test_a_proof_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("any-qwen3_vl_moe"), tmp_path / "model"))
    environment = {**os.environ, "TRINITY_CACHE": str(tmp_path / "cache")}
    asking = subprocess.Popen([sys.executable, "-c", ASKS, str(directory)], env=environment)
    try:
        while not (children := Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split()):
            assert asking.poll() is None
            time.sleep(0.05)
    finally:
        asking.kill()
        asking.wait()
    ends = time.monotonic() + 300.0
    while Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert not list((tmp_path / "cache").rglob("*.json")), "it was finished, and kept its verdict"
