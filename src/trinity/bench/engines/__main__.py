"""``python PATH/engines NAME SOCKET SETTINGS``: serves with the engine ``NAME`` over an inherited socket.

Started by its path, so that a Python in whose environment trinity is not installed can run it: that of another engine.
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
    if not __package__:  # by its path: let `trinity` be found from here, and nothing else beside it
        package = ModuleType("trinity")
        package.__path__ = [str(HERE.parent.parent)]
        sys.modules["trinity"] = package
        sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != HERE]
    engine = importlib.import_module(f"trinity.bench.engines.serve_{name}")
    engine.main(int(socket), json.loads(settings))


if __name__ == "__main__":
    main(sys.argv[1:])
