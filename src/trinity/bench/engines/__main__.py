"""Serve with one engine over an inherited socket: ``python PATH/engines NAME SOCKET SETTINGS``.

It is started by its path, so that the Python of another engine can run it without trinity installed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> None:
    name, socket, settings = arguments
    if not __package__:  # started by path: make `trinity` importable from here, and nothing else beside it
        package = ModuleType("trinity")
        package.__path__ = [str(HERE.parent.parent)]
        sys.modules["trinity"] = package
        sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != HERE]
    engine = importlib.import_module(f"trinity.bench.engines.serve_{name}")
    engine.main(int(socket), json.loads(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
