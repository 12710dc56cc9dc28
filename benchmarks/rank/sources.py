"""Sources on which a record of the rank benchmark depends: the modules that some modules import, and theirs."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.setting import ROOT

TWIN = "csrc/simulation/*"


def digest(files: Iterable[Path]) -> str:
    """Of what is in them."""
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def behind(roots: Sequence[str], without: Sequence[str] = (), root: Path = ROOT) -> list[Path]:
    """Files of trinity's modules that ``roots`` import, directly or not, except ``without``; with the compiled twin."""
    left, found = [*roots], dict[str, Path]()
    while left:
        name = left.pop()
        path = _file(name, root)
        if path is not None and name not in found and name not in without and name != "trinity":
            found[name] = path
            left += _imported(path, root)
    return [*(found[name] for name in sorted(found)), *sorted(root.glob(TWIN))]


def _file(name: str, root: Path) -> Path | None:
    place = root.joinpath("src", *name.split("."))
    return next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists()), None)


def _imported(path: Path, root: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trinity":
            for each in node.names:
                name = f"{node.module}.{each.name}"
                yield name if _file(name, root) else node.module
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "trinity")
