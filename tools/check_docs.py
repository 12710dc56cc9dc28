"""Documents that keep up: links and names of files resolve, docs/structures.md has one line for each module.

Sources are cited by the names in docs/papers.md, never by a number of a folder that only its owner has. A module's line
starts with "- `its.path.py`:", the path counted from src/trinity. A package of small alike files
(adapters, recipes) may have one line that ends in "/".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w./:-])(?!https?:)([\w./-]*\w\.md)\b")
ABOVE = re.compile(r"(?<![\w./}])\.\./[\w./-]*\w")
NUMBERED = re.compile(r"(?:\bpapers? |\b(?:TriInfer|HydraInfer|EPD-?Serve|vLLM),? |\()\(?(00\d)\b(?![.,]\d)")
TEXT = {".cmake", ".cpp", ".cu", ".h", ".md", ".py", ".sh", ".toml", ".txt"}
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "src", "tests", "tools")
CODE = re.compile(r"`([\w/]+(?:/|\.py))`")
MODULE = re.compile(r"^- `([\w./]+)`:", re.MULTILINE)


def documents(root: Path) -> list[Path]:
    hidden = {".venv", ".git", ".pytest_cache", "build", "mutants"}
    return sorted(path for path in root.rglob("*.md") if not hidden & set(path.relative_to(root).parts))


def anchors(text: str) -> set[str]:
    """The names under which the headings of a document are linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(root: Path) -> Iterator[str]:
    for document in documents(root):
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in path or target.startswith("mailto:"):
                continue
            there = (document.parent / path) if path else document
            if not there.exists():
                yield f"{document}: no file {target}"
            elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                yield f"{document}: no heading for {target}"


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of text that the project keeps, and what is in it."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*")] + list(root.glob("*"))
    for path in sorted(found):
        if path.is_file() and (path.suffix in TEXT or path.name == "Makefile"):
            yield path, path.read_text(encoding="utf-8")


def lost_sources(root: Path) -> Iterator[str]:
    """Citations by number, and names of files that are not in the project (tests make up files of their own)."""
    for path, text in texts(root):
        for number in NUMBERED.findall(text):
            yield f"{path}: {number} is no source that docs/papers.md names"
        if path == root / "docs/papers.md":
            gone = (name for name in CODE.findall(text) if not (root / "src/trinity" / name).exists())
            yield from (f"{path}: no {name}" for name in gone)
        if (root / "tests") in path.parents:
            continue
        for name in sorted({*FILE.findall(text), *ABOVE.findall(text)}):
            if not any((folder / name).exists() for folder in (root, path.parent)):
                yield f"{path}: names {name}, which is not in the project"


def module_list(root: Path) -> Iterator[str]:
    page, source = root / "docs/structures.md", root / "src" / "trinity"
    listed = set(MODULE.findall(page.read_text(encoding="utf-8")))
    there = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    for path in sorted(there):
        is_empty = path.endswith("__init__.py") and not (source / path).read_text(encoding="utf-8").strip()
        if not is_empty and not any(path == line or (line.endswith("/") and path.startswith(line)) for line in listed):
            yield f"{page}: no line for {path}"
    for line in sorted(listed):
        if not (source / line).exists():
            yield f"{page}: {line} is not there any more"


def main(root: Path) -> int:
    problems = [*broken_links(root), *lost_sources(root), *module_list(root)]
    print("\n".join(problems) or f"{len(documents(root))} documents: links, sources and module list complete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
