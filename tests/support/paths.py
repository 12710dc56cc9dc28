"""Where the project's files are, wherever in tests/ asks, and what a program of the tests needs to import."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
EXAMPLES = ROOT / "examples"
PHOTOS = EXAMPLES / "photos"
PYTHON_PATH = os.pathsep.join((str(ROOT / "src"), str(TESTS)))  # PYTHONPATH of a process that a test starts
BINARY = frozenset({".jpg", ".gz", ".safetensors"})  # of photographs, traces and the one model that is shipped
