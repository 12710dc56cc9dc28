"""Source of a package as syntax trees, one a module, and the sizes that they have."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file of a package; ``name`` is dotted, and that of an ``__init__.py`` is its folder's."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


Modules = dict[str, Module]


def read_package(source: Path, package: str) -> Modules:
    """Modules of ``package`` below ``source`` by name, without the tests that some packages carry inside."""
    found = {}
    for path in sorted((source / package).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if "tests" not in parts[:-1]:
            text = path.read_text(encoding="utf-8")
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return found


def room(name: str, modules: Modules) -> str:
    """First-level folder that holds module ``name``, as "core/", or the file at the root, as "errors.py"."""
    package, *inner = name.split(".")
    if not inner:
        return "__init__.py"
    first = f"{package}.{inner[0]}"
    return f"{inner[0]}/" if len(inner) > 1 or (first in modules and modules[first].is_package) else f"{inner[0]}.py"


def root_files(modules: Modules) -> list[str]:
    return sorted({found for name in modules if not (found := room(name, modules)).endswith("/")})


def folders(modules: Modules) -> list[Path]:
    """Folders that hold modules: the package's own and those below it."""
    return sorted({module.path.parent for module in modules.values()})


def statements(tree: ast.AST, *, type_only: bool = True) -> Iterator[ast.stmt]:
    """Every statement at any depth; ``type_only`` includes those under ``if TYPE_CHECKING``, which never run."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for child in getattr(tree, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            skipped = not type_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from statements(ast.Module(child.orelse, []) if skipped else child, type_only=type_only)


def functions(modules: Modules) -> Iterator[tuple[Module, Function]]:
    """Every function with its module, methods and nested ones too."""
    for module in modules.values():
        for statement in statements(module.tree):
            if isinstance(statement, Function):
                yield module, statement


def function_lengths(modules: Modules) -> list[int]:
    """Lines from ``def`` to the end of each function, shortest first."""
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for _, node in functions(modules))


def spread(lengths: list[int]) -> tuple[float, int, int]:
    """Median, 95th percentile and maximum of sorted ``lengths``; zeros where there are none."""
    if not lengths:
        return 0, 0, 0
    return statistics.median(lengths), lengths[math.ceil(0.95 * len(lengths)) - 1], lengths[-1]


def longer_than(limit: int, lengths: Iterable[int]) -> int:
    return sum(length > limit for length in lengths)
