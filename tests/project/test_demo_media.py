"""The demo of a clip and a spoken sentence, as a newcomer runs it; and the voice."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from examples import demo_media
from examples.demo_media import FORMANTS, RATE, speak

ROW = re.compile(
    r"^  (\S+) +(\d+) prompt tokens, (\d+) of them media, ([\d.]+) MiB moved, (\d) of 2 equal$", re.MULTILINE
)


@pytest.mark.timeout(600)  # ten times what it takes
@pytest.mark.parametrize("over", [["shm"], pytest.param([], id="all", marks=pytest.mark.slow)], ids=" ".join)
def test_as_a_newcomer_runs_it(over: list[str], tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    run = subprocess.run(
        [sys.executable, demo_media.__file__, *(["--over", *over] if over else [])],
        cwd=tmp_path,
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stderr == "", "a newcomer wonders about every line here"
    assert run.stdout.endswith("Every token equals generate().\n")
    assert run.stdout.count("Another one in its place gives other tokens.") == 2
    methods = [*demo_media.METHODS, *(f"E+P+D@{scheme}" for scheme in over or demo_media.SCHEMES)]
    rows = ROW.findall(run.stdout)
    assert [row[0] for row in rows] == methods * 2
    for method, prompt, media, moved, equal in rows:
        assert 10 < int(media) < int(prompt)
        assert equal == "2"
        assert (float(moved) > 0) == ("+" in method)


def test_a_control_that_changes_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_media, "METHODS", ("EPD",))
    case = demo_media.clip_case()
    assert not asyncio.run(
        demo_media.show(case._replace(control=msgspec.structs.replace(case.asked, request_id="again")), tmp_path, ())
    )


@pytest.mark.parametrize("vowel", FORMANTS)
def test_a_vowel_is_loud_at_its_formants(vowel: str) -> None:
    """The strongest harmonic near the first formant is louder than any in the gap between the second and 4 kHz."""
    spoken = speak([vowel, vowel], each_s=0.25)
    assert spoken.dtype == np.float32
    assert len(spoken) == RATE // 2
    assert np.abs(spoken).max() == pytest.approx(0.5, abs=0.02)
    power = np.abs(np.fft.rfft(spoken)) ** 2
    hertz = np.fft.rfftfreq(len(spoken), 1 / RATE)
    first = FORMANTS[vowel][0]
    near, far = np.abs(hertz - first) < 150, hertz > 4200
    assert power[near].max() > 30 * power[far].max()


def test_sentences_differ_and_the_ends_are_quiet() -> None:
    one, other = speak(["ah", "oo"]), speak(["ee", "er"])
    assert not np.allclose(one, other, atol=0.05)
    assert abs(one[0]) == abs(one[-1]) == 0
    with pytest.raises(KeyError):
        speak(["x"])
