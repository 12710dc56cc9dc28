"""The notebooks run from top to bottom in kernels of their own, whose loops run already, and show what they promise."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

import nbformat
import pytest

from support.notebooks import check_empty, printed, run_notebook, shown
from support.paths import EXAMPLES

NAMES = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


def is_picture(cell: nbformat.NotebookNode) -> bool:
    return base64.b64decode(shown(cell, "image/png")).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_kept_without_outputs(name: str) -> None:
    check_empty(name)


def test_two_placements_compared_with_pictures(tmp_path: Path) -> None:
    cells = run_notebook("notebook.ipynb", tmp_path)
    said = [printed(cell) for cell in cells]
    assert is_picture(cells[0])
    assert said[1].endswith("Pipeline(shapes on 1E1P1D, running, 0 ended)")
    assert all(f"<td>{name}</td>" in shown(cells[1], "text/html") for name in ("E0", "P0", "D0"))
    assert said[2].strip() == "a yellow star"
    assert "a red circle left of a blue square" in said[3]
    assert "E0 → P0 → D0" in said[3]
    assert all(map(is_picture, (cells[4], cells[8]))), "pictures, without a magic line"
    assert re.search(r"image E0 → P0 [1-9]\d* bytes", said[5])
    assert "kv P0 → D0" in said[5]
    assert "[(' nothing', 26, 16), (' a green circle', 26, 0)]" in said[6]
    assert "slices of 3 instances" in said[7]
    assert "<td>E0</td>" in shown(cells[7], "text/html")
    assert "True ['EPD0']" in said[8]


def test_composed_by_hand_its_tokens_are_those_of_generate(tmp_path: Path) -> None:
    text = "".join(map(printed, run_notebook("compose.ipynb", tmp_path)))
    assert text.count("equal to generate(): True") == 2
    assert text.count("image by inproc 1 blocks 4096 bytes") == 2  # 16 rows of 64 floats, of a block of 576
    assert "length on E0 and PD0" in text
    assert "kv by shm" in text
    assert [text.index(f"to {name}\n") for name in ("PD0 Offer", "PD0 Commit", "E0 Release")]


def test_a_plan_from_ones_own_trace(tmp_path: Path) -> None:
    cells = run_notebook("own_trace.ipynb", tmp_path, tmp_path)
    said = [printed(cell) for cell in cells]
    assert is_picture(cells[0])
    assert "Trace(240 requests" in said[1]
    assert "1 instances" in said[2]
    assert "<td>" in shown(cells[3], "text/html")
    assert "tables profiled on a live instance" in said[4]
    assert "Algorithm 2" in said[4]
    assert "a red circle" in said[5]
    assert (tmp_path / "trace.jsonl").read_bytes().count(b"\n") >= 240


def test_a_kill_watched_live(tmp_path: Path) -> None:
    cells = run_notebook("kill.ipynb", tmp_path)
    said = [printed(cell) for cell in cells]
    assert "a red circle left of a blue square" in said[1]
    frames = [one for one in cells[2].outputs if "<iframe" in one.get("data", {}).get("text/html", "")]
    updates = [
        one for one in cells[2].outputs if "postMessage" in one.get("data", {}).get("application/javascript", "")
    ]
    assert (len(frames), len(updates)) == (1, 1), "one frame, and the script that the newest snapshot is in"
    seen = re.search(r'"name":"D0".*?"state":"(\w+)","epoch":(\d+)', html.unescape(shown(cells[3], "text/html")))
    assert seen is not None
    assert seen.groups() != ("up", "0"), "the page shows its loss, or that it was started again"
    assert "'Output': 200" in said[4]
    assert "{True}" in said[4], "each whole answer is right"
    assert "survived the loss of their instance" in said[5]
    assert "D0 was lost" in said[5] or "it had none" in said[5]
    assert "state='up', epoch=1" in said[6]
    assert "['E0', 'P0', 'D0']" in said[6]
    page = html.unescape(shown(cells[7], "text/html"))
    assert re.search(r'"name":"D0","roles":"P"', page), "the page draws it as a P"
    assert re.search(r'"planned":true', page), "a change that was asked for is no loss"
    assert "{True} lives: Counter({1: 400})" in said[8], "all right, and nobody had to begin again"
    assert re.search(r"prefilled by Counter\(.*'D0': \d", said[8])
    assert re.search(r"Switch\(name='D0', former='D', roles='P', .*emptied=True", said[8])
    assert "slices of 4 instances" in said[9]
    assert re.findall(r"D0 (\w+) .*\d s", said[9]) == ["preparation", "offload", "migration", "onload"]
