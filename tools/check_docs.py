"""Documents that keep up: links resolve, what they name of trinity is there, docs/structures.md has a line per package.

A package's line in docs/structures.md starts with "- `its/path/`:", the path counted from src/trinity; packages deeper
than two levels need none. Modules are not listed by hand: tools/module_list.py does that. What documents name between
backticks occurs somewhere in the sources. Sources are cited by the names in docs/papers.md, never by a number of a
folder that only its owner has. No file of text has the marks that a merge leaves.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import module_list, names

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w./:-])(?!https?:)([\w./-]*\w\.md)\b")
ABOVE = re.compile(r"(?<![\w./}])\.\./[\w./-]*\w")
NUMBERED = re.compile(r"(?:\bpapers? |\b(?:TriInfer|HydraInfer|EPD-?Serve|vLLM),? |\()\(?(00\d)\b(?![.,]\d)")
TEXT = {".cmake", ".cpp", ".cu", ".h", ".md", ".py", ".sh", ".toml", ".txt"}
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "src", "tests", "tools")
CODE = re.compile(r"`([\w/]+(?:/|\.py))`")
PACKAGE = re.compile(r"^- `([\w/]+)/`:", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HISTORY = ("CHANGELOG", "house")  # they name what was
MERGED = re.compile(r"^(?:<{7} |>{7} )", re.MULTILINE)
DEEP = 2
FOREIGN = {"kv_role", "libcudart_static"}  # others' words
NAMING = {"": ("md", "rst", "ipynb"), "src": ("py",), "benchmarks": ("py",), "examples": ("py",)}
HIDDEN = {".venv", ".git", ".pytest_cache", ".peers", "build", "mutants"}


def documents(root: Path, *endings: str) -> list[Path]:
    """Markdown files, or files of other ``endings``; none that a tool has made or installed."""
    return [path for path in kept(root) if path.suffix.lstrip(".") in (endings or ("md",))]


def kept(root: Path) -> list[Path]:
    """Files of the project below ``root``, sorted: those that git tracks, or would; without git, all but HIDDEN."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        listed = subprocess.CompletedProcess(command, 1)
    if listed.returncode == 0 and listed.stdout:  # an unpacked release, perhaps within another's checkout, lists none
        found = [root / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in root.rglob("*") if not HIDDEN & set(path.relative_to(root).parts)]
    return sorted(path for path in found if path.is_file())


def anchors(text: str) -> set[str]:
    """The names under which the headings of a document are linked to."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(root: Path) -> Iterator[str]:
    """Relative links of Markdown files to files or headings that are not there."""
    for document in documents(root):
        for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
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
    for path in kept(root):
        top, *below = path.relative_to(root).parts
        if (not below or top in FOLDERS) and (path.suffix in TEXT or path.name == "Makefile"):
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


def unmerged(root: Path) -> Iterator[str]:
    """Files in which a merge has left both of its sides."""
    yield from (f"{path}: a merge has left its marks" for path, text in texts(root) if MERGED.search(text))


def dead_names(root: Path) -> Iterator[str]:
    """Dotted names below trinity, and paths of source files, that documents and sources name and nothing has."""
    known = names.Names(root)
    for document in (path for folder, endings in NAMING.items() for path in documents(root / folder, *endings)):
        if document.stem not in HISTORY:
            for line, text in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
                yield from (f"{document}:{line}: there is no {name}" for name in known.dead(text))


def unknown_words(root: Path) -> Iterator[str]:
    """Identifiers between backticks in Markdown that occur in no source, and in no example of the document itself."""
    known = names.words(root) | FOREIGN
    for document in documents(root):
        if document.stem not in HISTORY:
            text = document.read_text(encoding="utf-8")
            own = {word for fence in FENCE.findall(text) for word in names.WORD.findall(fence)}
            lines = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text).splitlines()
            found = ((line, word) for line, each in enumerate(lines, 1) for word in names.identifiers(each))
            unknown = ((line, word) for line, word in found if word not in known and word not in own)
            yield from (f"{document}:{line}: nothing is called {word}" for line, word in unknown)


def package_list(root: Path) -> Iterator[str]:
    """Packages without a line in docs/structures.md, lines without a package, modules without a docstring."""
    page, source = root / "docs/structures.md", root / "src" / "trinity"
    listed = set(PACKAGE.findall(page.read_text(encoding="utf-8")))
    there = {path.parent.relative_to(source).as_posix() for path in source.rglob("__init__.py")} - {"."}
    for package in sorted(there):
        if package not in listed and package.count("/") < DEEP:
            yield f"{page}: no line for {package}/"
    yield from (f"{page}: {line}/ is not there any more" for line in sorted(listed - there))
    yield from (f"{module}: no docstring says what it is" for module in module_list.undescribed(source))


def problems(root: Path) -> list[str]:
    """Everything that documents have wrong, a line each."""
    checks = (broken_links, lost_sources, unmerged, dead_names, unknown_words, package_list)
    return [each for check in checks for each in check(root)]


def main(root: Path) -> int:
    found = problems(root)
    print("\n".join(found) or f"{len(documents(root))} documents: links, sources, names and the list of packages hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
