"""Imports of a package as a graph: arrows between modules and between rooms, layers and cycles.

A room is a folder directly below the package, or a file at its root. An import inside a function counts. One under
``if TYPE_CHECKING`` counts as an arrow, since the reader follows it, but neither for layers nor for cycles: it never
runs.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tools.house_source import Module, Modules, room, statements

Arrow = tuple[str, str]


def imported_names(module: Module, *, type_only: bool) -> Iterator[str]:
    """Absolute dotted name of everything that a module imports; ``from a import b`` gives ``a.b``."""
    for statement in statements(module.tree, type_only=type_only):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{_absolute(statement, module)}.{alias.name}" for alias in statement.names)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    """Package that a ``from`` names, with its leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - module.is_package
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def nearest_module(name: str, modules: Modules) -> str | None:
    """Module that defines the imported ``name``: itself, else the longest prefix that is a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def import_arrows(modules: Modules, *, type_only: bool) -> set[Arrow]:
    """Distinct pairs (importing module, imported module)."""
    return {
        (name, target)
        for name, module in modules.items()
        for imported in imported_names(module, type_only=type_only)
        if (target := nearest_module(imported, modules)) and target != name
    }


def crossing(arrows: Iterable[Arrow], modules: Modules) -> set[Arrow]:
    """Those ``arrows`` between modules that leave a room."""
    return {(start, end) for start, end in arrows if room(start, modules) != room(end, modules)}


def room_arrows(arrows: Iterable[Arrow], modules: Modules) -> set[Arrow]:
    """Distinct pairs of rooms that ``arrows`` between modules join."""
    return {(room(start, modules), room(end, modules)) for start, end in crossing(arrows, modules)}


def visiting_arrows(root: Path, names: Iterable[str], modules: Modules) -> set[Arrow]:
    """Arrows from the project's other folders (``names`` below ``root``), each a room, to rooms of the package."""
    found = set()
    for folder in names:
        for path in (root / folder).rglob("*.py"):
            visitor = Module(path.stem, path, ast.parse(path.read_text(encoding="utf-8")), 0)
            targets = (nearest_module(name, modules) for name in imported_names(visitor, type_only=True))
            found |= {(f"{folder}/", room(target, modules)) for target in targets if target}
    return found


def _reachable(arrows: Iterable[Arrow]) -> dict[str, set[str]]:
    """For each node all nodes that a path of arrows leads to."""
    ends: dict[str, set[str]] = {}
    for start, end in arrows:
        ends.setdefault(start, set()).add(end)
        ends.setdefault(end, set())
    return {node: _walk(ends, node) for node in ends}


def _walk(ends: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        fresh = ends[pending.pop()] - seen
        seen |= fresh
        pending += fresh
    return seen


def in_cycles(arrows: Iterable[Arrow]) -> list[str]:
    """Nodes that a path of arrows leads back to."""
    return sorted(node for node, reached in _reachable(arrows).items() if node in reached)


def layers(arrows: Iterable[Arrow]) -> list[list[str]]:
    """Nodes by floor, the lowest first: each stands above all that it reaches; a cycle shares one floor."""
    reached = _reachable(arrows)

    @cache
    def floor(node: str) -> int:
        below = [floor(other) for other in reached[node] if node not in reached[other]]
        return 1 + max(below, default=-1)

    floors: dict[int, list[str]] = {}
    for node in sorted(reached):
        floors.setdefault(floor(node), []).append(node)
    return [floors[number] for number in sorted(floors)]


def contract_layers(pyproject: Path) -> int:
    """Layers that import-linter holds, 0 where a project has no such contract."""
    if not pyproject.exists():
        return 0
    tool = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {})
    contracts = tool.get("importlinter", {}).get("contracts", [])
    return max((len(each["layers"]) for each in contracts if each.get("type") == "layers"), default=0)
