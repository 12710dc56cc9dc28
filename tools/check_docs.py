"""Documents that keep up: every relative link resolves, and docs/structures.md has one line for each module.

A module's line starts with "- `its.path.py`:", the path counted from src/trinity. A package of small alike files
(adapters, recipes) may have one line that ends in "/".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
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


def module_list(root: Path) -> Iterator[str]:
    page, source = root / "docs" / "structures.md", root / "src" / "trinity"
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
    problems = [*broken_links(root), *module_list(root)]
    print("\n".join(problems) or f"{len(documents(root))} documents: links and module list complete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
