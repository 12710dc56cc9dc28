"""Command: ``trinity version`` prints the versions of trinity and of what it runs on, and the native code in use."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from trinity.errors import DISTRIBUTION

BESIDE = ("torch", "transformers", "numpy", "triton", "nixl-cu13", "ucxx-cu13", "starlette", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one name and version a line; what is not installed is left out."""
    example = "example:\n  trinity version"
    formatter = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(
        prog="trinity version", description=main.__doc__, epilog=example, formatter_class=formatter
    ).parse_args(arguments)
    rows = {DISTRIBUTION: version(DISTRIBUTION), "python": platform.python_version(), **_installed()}
    for name, found in rows.items():
        print(f"{name:<16}{found}")
    return 0


def _installed() -> dict[str, str]:
    found = {}
    for name in BESIDE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
