"""``python -m trinity.check --weights``: digests of a checkpoint's files, printed and compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memory.test_weight_digests import flip, write_checkpoint
from trinity.memory.weight_check import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", {"a": bytes(range(256)) * 5000, "b": b"bias"})


def printed(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--weights", str(checkpoint)]) == 0
    return capsys.readouterr().out


def test_what_it_prints_is_for_sha256sum_too(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "digests").write_text(printed(checkpoint, capsys))
    run = subprocess.run(["sha256sum", "-c", "digests"], cwd=checkpoint, capture_output=True, text=True)
    assert run.returncode == 0
    assert run.stdout.splitlines() == ["config.json: OK", "model.safetensors: OK"]
    assert main(["--weights", str(checkpoint), "--digest", str(checkpoint / "digests")]) == 0
    assert capsys.readouterr().out == "2 files are as they should be\n"


def test_a_flipped_bit_is_told_by_name(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "digests").write_text(printed(checkpoint, capsys))
    flip(checkpoint / "model.safetensors", 600_000)
    assert main(["--weights", str(checkpoint), "--digest", str(tmp_path / "digests")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("model.safetensors: differs, ")
    assert out.endswith("1 of 2 files differ\n")


def test_files_that_lack_or_are_too_many_are_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digests").write_text(printed(checkpoint, capsys))
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    assert main(["--weights", str(checkpoint), "--digest", str(tmp_path / "digests")]) == 1
    out = capsys.readouterr().out
    assert "model.safetensors: missing" in out
    assert "model-1.safetensors: not in the digests" in out


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "has no digests"), ("hello\n", "line 1"), ("0" * 63 + "  model.safetensors\n", "no line of sha256sum")],
)
def test_a_file_of_something_else_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (tmp_path / "digests").write_text(text)
    assert main(["--weights", str(checkpoint), "--digest", str(tmp_path / "digests")]) == 2
    assert problem in capsys.readouterr().err


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--weights", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["--weights", str(tmp_path)]) == 2
    assert "no weights" in capsys.readouterr().err
    assert main(["--weights", str(tmp_path), "--digest", str(tmp_path / "none")]) == 2


def test_the_command_runs(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "trinity.check", "--weights", str(checkpoint)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, len(run.stdout.splitlines()), run.stderr) == (0, 2, "")
