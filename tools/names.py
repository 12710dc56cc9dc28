"""Names of trinity as documents write them: which of them the source has. Nothing is imported: the files are read.

Two forms count: dotted names (``trinity.transport.base.Remote``), and paths of files of C++, CUDA or Python. A path is
there where the repository, src/trinity, or a folder of csrc, tests, tools or benchmarks has a file that ends so.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DOTTED = re.compile(r"(?<![\w./-])trinity(?:\.[A-Za-z_]\w*)+(?![\w/*{])")
SOURCE_FILE = re.compile(r"(?<![\w./{*>-])((?:\w[\w.]*/)*\w+\.(?:py|cpp|cu|hpp))(?![\w*])")
IMPORT = re.compile(r"\bfrom (trinity[\w.]*) import ([\w, ]+)")
WORD = re.compile(r"\w+")
CODE = re.compile(r"`([^`]+)`")
# CamelCase, or words joined by underscores: other words may be plain English
IDENTIFIER = re.compile(r"\b(?:[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)*|[a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b")
SOURCES = (".py", ".pyi", ".cpp", ".cu", ".hpp", ".txt", ".toml", ".ipynb")
FOLDERS = ("csrc", "src/trinity", "tests", "tools", "benchmarks", "examples", "docs/site")


def words(root: Path) -> set[str]:
    """Every word of the sources: of a document's identifiers those that are not among them are gone."""
    texts = [path.read_text(encoding="utf-8") for path in _files(root) if path.suffix in SOURCES]
    texts += [
        path.read_text(encoding="utf-8") for path in (root / "pyproject.toml", root / "Makefile") if path.exists()
    ]
    return {word for text in texts for word in WORD.findall(text)}


def identifiers(line: str) -> Iterator[str]:
    """Identifiers between the backticks of a line of Markdown."""
    yield from (word for code in CODE.findall(line) for word in IDENTIFIER.findall(code))


class Names:
    """Collect the names of a checkout at ``root``."""

    def __init__(self, root: Path) -> None:
        self.source = root / "src" / "trinity"
        self.groups = _entry_point_groups(root)
        self.files = {path.relative_to(root).as_posix() for path in _files(root)}

    def dead(self, text: str) -> Iterator[str]:
        """List the names of a text that the checkout lacks, in the text's order."""
        if "." not in text and "import" not in text:
            return  # as most lines
        imported = (f"{module}.{name.split()[0]}" for module, said in IMPORT.findall(text) for name in _listed(said))
        named = (*DOTTED.findall(text), *imported)
        yield from (name for name in named if name not in self.groups and not self.has(name))
        yield from (path for path in SOURCE_FILE.findall(text) if not self.has_file(path))

    def has_file(self, path: str) -> bool:
        return any(each == path or each.endswith(f"/{path}") for each in self.files)

    def has(self, name: str) -> bool:
        """Test whether a dotted name is a module, or a member of one."""
        parts = name.split(".")[1:]
        place = self.source
        while parts and (place / parts[0]).is_dir():
            place /= parts.pop(0)
        module = place / "__init__.py"
        if len(parts) == 1 and (place / f"{parts[0]}.pyi").exists():
            return True
        if parts and (place / f"{parts[0]}.py").exists():
            module = place / f"{parts.pop(0)}.py"
        return not parts or parts[0].startswith("__") or _member(module, tuple(parts))


def _listed(names: str) -> list[str]:
    return [name for name in names.split(",") if name.strip()]


def _entry_point_groups(root: Path) -> set[str]:
    settings = root / "pyproject.toml"
    if not settings.exists():
        return set()
    project = tomllib.loads(settings.read_text(encoding="utf-8"))["project"]
    return set(project.get("entry-points", {}))


def _files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path for path in (root / folder).rglob("*.*") if path.is_file())


@cache
def _names(module: Path) -> dict[str, ast.stmt]:
    """What a module binds, by name; none where there is no such file."""
    return dict(_bound(ast.parse(module.read_text(encoding="utf-8")).body)) if module.exists() else {}


def _member(module: Path, parts: tuple[str, ...]) -> bool:
    """Test whether the module binds the first name and, where that is a class of its own, the class the second."""
    bound = _names(module)
    if parts[0] not in bound:
        return False
    found = bound[parts[0]]
    if len(parts) == 1 or not isinstance(found, ast.ClassDef) or found.bases:
        return True
    return parts[1] in dict(_bound(found.body)) or parts[1] in _own_attributes(found)


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that statements bind, those under ``if`` and ``try`` included."""
    for each in body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name, each
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], each) for alias in each.names)
        elif isinstance(each, ast.Assign):
            names = (name for target in each.targets for name in ast.walk(target))
            yield from ((name.id, each) for name in names if isinstance(name, ast.Name))
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each
        elif isinstance(each, ast.If | ast.Try):
            yield from _bound([*each.body, *each.orelse])


def _own_attributes(found: ast.ClassDef) -> set[str]:
    """Attributes that methods of a class give to ``self``."""
    stores = (each for each in ast.walk(found) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store))
    return {each.attr for each in stores if isinstance(each.value, ast.Name) and each.value.id == "self"}
