"""The site: python tools/build_site.py [ROOT]. Pages, notebooks with their outputs, and the reference, in build/docs.

Documents are copied to build/site with the files they link to, under the paths they have in the repository, so that
their links hold; README is the first page. Sphinx builds from there, and takes each warning for an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import performance_page, report
from tools import module_list
from tools.check_docs import LINK, documents

GUIDE = [
    "requests",
    "server",
    "deploy",
    "hosts",
    "ray",
    "placements",
    "transports",
    "planning",
    "reliability",
    "gpu",
    "benchmarks",
    "promises",
]
INSIDE = ["structures", "glossary", "phases", "papers"]
NOTEBOOKS = [f"examples/{name}.ipynb" for name in ("notebook", "compose", "plan", "own_trace", "kill")]
PAGE = ".md"
FIRST = "README"  # becomes the page "index"
GENERATED = ("docs/modules", "docs/decisions/index", "docs/data/index")


def linked(root: Path, document: Path) -> set[Path]:
    """Files of the repository that a document links to, relative to ``root``, and that are no pages themselves."""
    targets = (target.partition("#")[0] for target in LINK.findall((root / document).read_text(encoding="utf-8")))
    paths = {(root / document.parent / target).resolve() for target in targets if target and "://" not in target}
    return {path.relative_to(root) for path in paths if path.is_file() and path.suffix not in (".md", ".ipynb")}


def contents(there: Iterable[Path]) -> str:
    """The tables of contents behind the first page: every page is in one of them."""
    left = {path.with_suffix("").as_posix() for path in there} - {FIRST}
    guide = [f"docs/{name}" for name in GUIDE if f"docs/{name}" in left]
    inside = [f"docs/{name}" for name in INSIDE if f"docs/{name}" in left]
    decisions = {name for name in left if name.startswith("docs/decisions/")}
    project = sorted(left - {*guide, *inside} - decisions, key=lambda name: (name.count("/"), name.lower()))
    groups = {
        "Guide": guide,
        "Tutorials": [name.removesuffix(".ipynb") for name in NOTEBOOKS],
        "Reference": ["reference/index"],
        "Inside": [*inside, *GENERATED[:2]],
        "Project": [*project, GENERATED[2]],
    }
    return "\n\n".join(_toctree(name, pages) for name, pages in groups.items() if pages)


def _toctree(caption: str, pages: Iterable[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])


def listing(title: str, text: str, pages: Iterable[str]) -> str:
    """A page that lists others beside it."""
    listed = "\n".join(["```{toctree}", ":maxdepth: 1", "", *pages, "```"])
    return f"# {title}\n\n{text}\n\n{listed}\n"


def decisions(there: Iterable[Path]) -> str:
    """The page that lists the decisions."""
    names = [path.stem for path in there if path.parent.name == "decisions"]
    return listing("Decisions", "Why it is as it is: the question, what was decided, why, what it costs.", names)


def measurements(root: Path, folder: Path) -> str:
    """Write a page of all tables for each benchmark into ``folder``; the page that lists them."""
    data = sorted((root / "docs" / "data").glob("*.json"))
    for path in data:
        written = folder / "docs" / "data" / path.with_suffix(".md").name
        written.write_text(performance_page.whole(*report.load(path)), encoding="utf-8")
    return listing(
        "Measurements", "All tables of each benchmark; Performance has what they come to.", [each.stem for each in data]
    )


def as_page(text: str) -> str:
    """A document's text with links to README as links to the first page, and links to data as links to their pages."""
    text = re.sub(r"(?<=\]\()((?:\.\./|docs/)*data/)(?=\))", rf"\1index{PAGE}", text)
    text = re.sub(r"(?<=\]\()((?:\.\./|docs/)*data/\w+)\.json(?=\))", rf"\1{PAGE}", text)
    return re.sub(rf"(?<=\]\()((?:\.\./)*){FIRST}(?={PAGE}[)#])", r"\1index", text)


def stage(root: Path, folder: Path) -> list[Path]:
    """Write all that Sphinx reads into an empty ``folder``; the pages' paths."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "docs" / "site", folder)
    shutil.copytree(root / "examples" / "photos", folder / "examples" / "photos")
    pages = [path.relative_to(root) for path in documents(root)]
    for path in sorted({Path(name) for name in NOTEBOOKS}.union(*(linked(root, page) for page in pages))):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, folder / path)
    for path in pages:
        target = folder / (path.with_stem("index") if path.with_suffix("") == Path(FIRST) else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(as_page((root / path).read_text(encoding="utf-8")), encoding="utf-8")
    with (folder / "index").with_suffix(".md").open("a", encoding="utf-8") as first:
        first.write(f"\n{contents(pages)}\n")
    made = (module_list.page(root / "src" / "trinity"), decisions(pages), measurements(root, folder))
    for name, text in zip(GENERATED, made, strict=True):
        (folder / name).with_suffix(".md").write_text(text, encoding="utf-8")
    return pages


def build(root: Path) -> int:
    """Stage and build; Sphinx's exit status."""
    source, target = root / "build" / "site", root / "build" / "docs"
    pages = stage(root, source)
    shutil.rmtree(target, ignore_errors=True)
    environment = {**os.environ, "TRINITY_ROOT": str(root), "JUPYTER_PLATFORM_DIRS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-q", "-d", str(root / "build" / "doctrees")]
    status = subprocess.run([*command, str(source), str(target)], env=environment).returncode
    if not status:
        print(f"{len(pages)} documents: {target}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
