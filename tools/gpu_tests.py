"""Run what needs a GPU on any Python that has torch: make test-gpu ARGS="[FILES] [PYTEST-ARGUMENTS]"

Only files that have the marker ``gpu`` are imported, so that nothing else of what tests need has to be there. Warnings
of a foreign machine's libraries are no errors. Raises ``SystemExit`` where a library is missing, with its name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"^\s*(@|pytestmark = )?pytest\.mark\.gpu\b", re.MULTILINE)
NEEDED = ("torch", "transformers", "triton", "msgspec", "anyio", "PIL", "pytest", "pytest_asyncio")
# Markers and settings of plugins that are not there are no errors; kernels are compiled within tests.
OPTIONS = ("-q", "-ra", "-m", "gpu", "-p", "no:cacheprovider")
OVERRIDES = ("addopts=", "filterwarnings=default", "timeout=300")


def find_gpu_files(root: Path = ROOT) -> list[Path]:
    """Find the test files with a test for GPUs, by the text of its marker."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [path for path in files if MARKED.search(path.read_text(encoding="utf-8"))]


def find_missing(names: Sequence[str] = NEEDED) -> list[str]:
    """List modules that this Python does not have."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def make_arguments(given: Sequence[str], root: Path = ROOT) -> list[str]:
    """Build pytest's arguments: files that are given, or all with the marker."""
    chosen = any((root / each.partition("::")[0]).exists() for each in given)
    files = [] if chosen else [str(path.relative_to(root)) for path in find_gpu_files(root)]
    overrides = [word for each in OVERRIDES for word in ("-o", each)]
    return [*OPTIONS, *overrides, *files, *given]


def describe_device() -> str:
    """Say in a line with which device and libraries the tests run."""
    import torch

    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} sees none; kernels run in Triton's interpreter, the rest is skipped"
    names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return f"{names}: torch {torch.__version__}"


def main(given: Sequence[str]) -> int:
    missing = find_missing()
    if missing:
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(missing)}: `make gpu-bundle` packs what a machine may lack"
        )
    import pytest

    os.chdir(ROOT)
    print(describe_device(), flush=True)
    return int(pytest.main(make_arguments(given)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
