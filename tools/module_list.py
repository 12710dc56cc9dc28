"""The modules of trinity, a line each, out of their docstrings: python tools/module_list.py [ROOT]

The site has them as a page. Nothing of it is committed: a module says itself what it is.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def first_line(source: Path) -> str:
    """The first line of a module's docstring; "" where it has none."""
    found = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    return found.splitlines()[0] if found else ""


def packages(source: Path) -> dict[str, dict[str, str]]:
    """First lines by module, by package: the root first, packages in the order of their names."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted(source.rglob("*.py"), key=lambda each: (each.parent.relative_to(source).parts, each.name)):
        package = ".".join([source.name, *path.parent.relative_to(source).parts])
        name = package if path.stem == "__init__" else f"{package}.{path.stem}"
        line = first_line(path)
        if line or path.stem != "__init__":
            found.setdefault(package, {})[name] = line
    return found


def undescribed(source: Path) -> list[str]:
    """Modules that say nothing of themselves."""
    return [name for modules in packages(source).values() for name, line in modules.items() if not line]


def page(source: Path) -> str:
    """The list as Markdown."""
    parts = ["# Modules", "The first line of each module's docstring, package by package."]
    for package, modules in packages(source).items():
        head = modules.get(package, "")
        lines = [f"- `{name}`: {line}" for name, line in modules.items() if name != package]
        parts += [f"## `{package}`", *([head] if head else []), "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    print(page(Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "src" / "trinity"), end="")
