"""Print pip's constraints for an end of the ranges in pyproject.toml: python tools/dependency_ends.py lowest|newest

    python tools/dependency_ends.py lowest > ends.txt
    python -m pip install -c ends.txt -e '.[audio,plan,plot,server,structured,video]' --group ends

The packages are those of ``dependencies`` and of the extras that ``make setup`` installs. For the newest pip needs no
constraint, and nothing is printed. Raises ``SystemExit`` for a range without a lower end, which no test can hold.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("audio", "plan", "plot", "server", "structured", "video")
RANGE = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<range>[^;]*)")


def list_lowest(requirements: Iterable[str]) -> Iterator[str]:
    """Yield "name==version" for the lower end of each range."""
    for each in requirements:
        found = RANGE.match(each)
        lower = re.search(r">=\s*([\w.]+)", found["range"]) if found is not None else None
        if found is None or lower is None:
            raise SystemExit(f"{each!r} in pyproject.toml has no lower end: give one that tests hold, such as >=1.0")
        yield f"{found['name']}=={lower[1]}"


def read_requirements(path: Path = ROOT / "pyproject.toml") -> list[str]:
    """Read what trinity needs, with the extras."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in (["lowest"], ["newest"]):
        raise SystemExit("give lowest or newest")
    if arguments[0] == "lowest":
        print("\n".join(list_lowest(read_requirements())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
