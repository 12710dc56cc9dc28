"""The tools behind `make test-exact` and `make test-load` find what they are for."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.paths import ROOT
from sweeps import exactness, load


def test_a_sweep_of_one_model_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "REQUESTS", 8)
    tally = exactness.Tally()
    exactness.sweep_once("llava", 7, tally, processes=False)
    assert (tally.requests, tally.wrong) == (8, 0)
    assert tally.tokens > 40


def test_other_weights_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference is given another checkpoint than the pipeline: the sweep must not call that equal."""
    monkeypatch.setattr(exactness, "REQUESTS", 4)
    drawn = exactness.draw_checkpoint

    def other(directory: Path, multimodal: bool, made: type[exactness.Reference] = exactness.Reference) -> object:
        return made(drawn("llama", directory.parent / "other", random.Random(99)), multimodal)

    monkeypatch.setattr(exactness, "Reference", other)
    assert exactness.main(["--requests", "4", "--seed", "3", "--only", "llama", "--processes", "0"]) == 1
    assert "WRONG llama seed 3 request 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("served", "wanted", "apart", "found"),
    [
        ([1, 2], [1, 2], [1.0, 1.0], "equal"),
        ([1, 3], [1, 2], [1.0, 1.0], "wrong"),
        ([1, 3], [1, 2], [1.0, 1e-6], "tie"),
        ([1, 3, 9], [1, 2, 4], [1.0, 1e-6, 1.0], "tie"),
        ([1], [1, 2], [1.0, 1e-6], "wrong"),
        ([1, 2, 3], [1, 2], [1e-6, 1e-6], "wrong"),
        ([], [1], [1e-6], "wrong"),
    ],
)
def test_a_tie_is_no_excuse_but_at_the_token_itself(
    served: list[int], wanted: list[int], apart: list[float], found: str
) -> None:
    assert exactness.compare(served, wanted, apart) == found


def test_chats_have_images_and_turns(tmp_path: Path) -> None:
    chats = [exactness.draw_chat(random.Random(seed), True, tmp_path) for seed in range(200)]
    pictures = [part["image"] for chat in chats for m in chat.messages for part in m["content"] if "image" in part]
    sources = [each.source for each in pictures]
    for kind in (str, bytes, np.ndarray, Image.Image):
        assert any(isinstance(each, kind) for each in sources), f"no picture is given as {kind.__name__}"
    assert {each.shown.mode for each in pictures} == {"RGB"}
    images = [sum(part["type"] == "image" for m in chat.messages for part in m["content"]) for chat in chats]
    assert {0, 1, 2, 3} <= set(images)
    assert {1, 3, 5} == {len(chat.messages) for chat in chats}
    bare, taken = exactness.split_images(chats[0].messages)
    assert len(taken) == images[0]
    assert not any("image" in part for message in bare for part in message["content"])


def test_the_tests_that_start_processes_are_found() -> None:
    found = load.find_tests(ROOT)
    assert set(load.FAILED_BEFORE) <= set(found), "a file was moved: name it anew"
    assert {"tests/e2e/test_exact_between_processes.py"} <= set(found)
    assert "tests/core/test_scheduler.py" not in found


def test_a_round_that_fails_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text("def test_it() -> None:\n    assert False\n")
    assert load.main(["--rounds", "1", "--loops", "1", str(tmp_path / "test_it.py")]) == 1
    assert "1 of 1 rounds failed" in capsys.readouterr().out


def test_busy_loops_end_with_the_block() -> None:
    with load.keep_busy(2):
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert listed.count(f"{sys.executable} -c while True: pass") >= 2
