"""Checks that import-linter lacks: imports that a core must never make, in whatever form.

An import inside a function counts, and so does one under ``if TYPE_CHECKING``: it names what the core must not know.
``tools/house.py`` finds import cycles. Modules of the package import each other by their own names, never through
``trinity`` itself, whose public names are loaded lazily from all of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "trinity"
# These run under a virtual clock as well as a live one, and know no tensor, no loop and no socket.
PURE = {"core", "costs", "planner", "simulation", "traces"}
PURE |= {"errors", "metrics", "placement", "plugins", "request", "tables"}  # and what they stand on
IMPURE = {"torch", "transformers", "anyio", "asyncio", "time", "socket", "threading", "uvloop"}


def modules(source: Path) -> dict[str, Path]:
    """Every module under ``source`` by its dotted name."""
    found = {}
    folder = source / PACKAGE
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):  # a .pyi stands for what is compiled
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, type_only: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported: ``from a import b`` gives ``a.b``, a relative import "."."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        here = pending.pop()
        if isinstance(here, ast.If) and "TYPE_CHECKING" in ast.unparse(here.test) and not type_only:
            pending += here.orelse
            continue
        pending += ast.iter_child_nodes(here)
        for name in _named(here):
            yield getattr(here, "lineno", 0), name


def _named(here: ast.AST) -> list[str]:
    if isinstance(here, ast.Import):
        return [alias.name for alias in here.names]
    if isinstance(here, ast.ImportFrom):
        return ["."] if here.level else [f"{here.module}.{alias.name}" for alias in here.names]
    if isinstance(here, ast.Call) and ast.unparse(here.func).rpartition(".")[2] in ("import_module", "__import__"):
        return [str(one.value) for one in here.args[:1] if isinstance(one, ast.Constant)]
    return []


def impure(found: dict[str, Path]) -> Iterator[str]:
    for name, path in found.items():
        if name.partition(".")[2].partition(".")[0] in PURE:
            for line, target in imports(path, type_only=True):
                if target.partition(".")[0] in IMPURE:
                    yield f"{path}:{line} {name} must not import {target}: it runs under a virtual clock too"


def roundabout(found: dict[str, Path]) -> Iterator[str]:
    for name, path in found.items():
        for line, target in imports(path, type_only=True):
            package, _, rest = target.partition(".")
            through_root = package == PACKAGE and "." not in rest and target not in set(found) - {PACKAGE}
            if target == "." or (through_root and name != PACKAGE):
                yield f"{path}:{line} {name} imports {target}: name the module of {PACKAGE} that it lives in"


def packages(found: dict[str, Path]) -> Iterator[str]:
    for folder in sorted({path.parent for path in found.values()}):
        if not (folder / "__init__.py").exists():
            yield f"{folder}: no __init__.py, so that neither a wheel nor the layers' check would have what is in it"


def apart(found: dict[str, Path]) -> Iterator[str]:
    sides = {f"{PACKAGE}.stages": f"{PACKAGE}.transport", f"{PACKAGE}.transport": f"{PACKAGE}.stages"}
    for name, path in found.items():
        other = sides.get(".".join(name.split(".")[:2]))
        for line, target in imports(path, type_only=True):
            if other and f"{target}.".startswith(f"{other}."):
                yield f"{path}:{line} {name} imports {target}: stages and transport meet in instance alone"


def main(source: Path) -> int:
    found = modules(source)
    problems = [*impure(found), *roundabout(found), *apart(found), *packages(found)]
    print("\n".join(problems) or f"{len(found)} modules: cores pure")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "src")))
