"""The house in figures: files, layers, arrows, names and docstrings of a package, and an image's way through it.

``python tools/house.py`` prints this tree; ``-v`` lists each culprit, ``--check`` exits with 1 where an aim is missed,
``--write`` puts the figures into the table of docs/house.md, where each is explained. ``--source DIR --package NAME``
measures another package, without serving; ``--write COLUMN`` puts it into that column.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # run as a script, it measures the tree that it lies in

from tools import house_graph as graph  # noqa: E402
from tools import house_page as page_table  # noqa: E402
from tools import house_source as source  # noqa: E402
from tools import house_walk as walk  # noqa: E402
from tools import house_words as words  # noqa: E402

OWN = "trinity"
VISITORS = ("benchmarks", "tools")  # the sketch of the house draws these as rooms too


class Figure(NamedTuple):
    """One measure: ``text`` as printed, and where there is an aim, the value that may be at most ``aim``."""

    label: str
    text: str
    value: int = 0
    aim: int | None = None
    found: Sequence[str] = ()

    @property
    def missed(self) -> bool:
        return self.aim is not None and self.value > self.aim

    def line(self) -> str:
        aim = "" if self.aim is None else f"  (aim at most {self.aim}{', missed' if self.missed else ''})"
        return f"{self.label:52} {self.text}{aim}"


def limited(label: str, found: Sequence[str], aim: int, out_of: int | None = None) -> Figure:
    """Count what was ``found``, at most ``aim``, of ``out_of`` in all."""
    of = "" if out_of is None else f" of {out_of:,}"
    return Figure(label, f"{len(found):,}{of}", len(found), aim, found)


def plain(label: str, value: int) -> Figure:
    return Figure(label, f"{value:,}", value)


def size_figures(modules: source.Modules) -> list[Figure]:
    lengths = source.function_lengths(modules)
    median, most, longest = source.spread(lengths)
    lines = [module.lines for module in modules.values()]
    return [
        limited("files at the root", source.root_files(modules), 14),
        plain("modules", len(modules)),
        plain("packages", len(source.folders(modules))),
        plain("lines", sum(lines)),
        Figure("function lines: median / p95 / max", f"{median:g} / {most} / {longest}"),
        plain("functions over 50 lines", source.longer_than(50, lengths)),
        plain("files over 400 lines", source.longer_than(400, lines)),
    ]


def graph_figures(modules: source.Modules, root: Path) -> list[Figure]:
    every = graph.import_arrows(modules, type_only=True)
    running = graph.import_arrows(modules, type_only=False)
    rooms = graph.room_arrows(every, modules)
    floors = [" ".join(floor) for floor in reversed(graph.layers(graph.room_arrows(running, modules)))]
    contract = graph.contract_layers(root / "pyproject.toml")
    visits = graph.visiting_arrows(root, VISITORS, modules)
    drawn = len(rooms | visits) if visits else 0
    return [
        limited("layers, computed", floors, 15),
        Figure("layers, in the contract", str(contract or "–"), contract, 15),
        Figure("arrows between rooms", str(len(rooms)), found=[f"{start} → {end}" for start, end in sorted(rooms)]),
        Figure("… with benchmarks and tools drawn too", str(drawn or "–")),
        plain("imports that cross rooms", len(graph.crossing(every, modules))),
        limited("modules in import cycles", graph.in_cycles(running), 0),
    ]


def word_figures(modules: source.Modules) -> list[Figure]:
    repeated = [f"{name}: {', '.join(homes)}" for name, homes in words.repeated_names(modules).items()]
    asking, texts = words.asking_docstrings(modules), len(list(words.docstrings(modules)))
    participles = words.participle_functions(modules)
    return [
        limited("names with two meanings", repeated, 0),
        limited("docstrings that begin by asking", asking, 0, texts),
        limited("modules named by a participle", words.participle_modules(modules), 0),
        Figure("functions named by a participle", f"{len(participles):,}", found=participles),
    ]


def figures(folder: Path, package: str, root: Path) -> list[Figure]:
    """Everything that the source of ``package`` below ``folder`` tells; ``root`` has its pyproject.toml."""
    modules = source.read_package(folder, package)
    return [*size_figures(modules), *graph_figures(modules, root), *word_figures(modules)]


def walk_figures(walks: Mapping[str, walk.Walk]) -> list[Figure]:
    """Files that one image enters on each placement, and its calls between them."""
    measured = []
    for placement, each in walks.items():
        calls = f"{each.crossing} / {each.within} / {each.flat}"
        measured.append(plain(f"image on {placement}: files entered", each.files))
        measured.append(Figure(f"… calls across rooms / inside / at root, {placement}", calls))
    return measured


def aims(measured: Sequence[Figure]) -> dict[str, str]:
    return {figure.label: "–" if figure.aim is None else f"≤ {figure.aim}" for figure in measured}


def write_page(page: str, column: str, measured: Sequence[Figure]) -> str:
    """Renew the column of one tree, and that of the aims."""
    page = page_table.write_column(page, "aim", aims(measured))
    return page_table.write_column(page, column, {each.label: each.text for each in measured})


def stale(page: str, measured: Sequence[Figure]) -> list[str]:
    """Figures with an aim of which the page has another count."""
    written = page_table.read_column(page, OWN)
    return [
        each.label
        for each in measured
        if each.aim is not None and written.get(each.label, "").split()[:1] != each.text.split()[:1]
    ]


def report(measured: Sequence[Figure], *, verbose: bool) -> list[str]:
    lines = []
    for figure in measured:
        lines += [figure.line(), *([f"    {each}" for each in figure.found] if verbose else [])]
    return lines


def problems(measured: Sequence[Figure], page: Path | None) -> list[str]:
    """Aims that are missed; of this tree, for which ``page`` has a column, figures that it has from a former one."""
    found = [f"{each.label}: {each.text}, at most {each.aim}" for each in measured if each.missed]
    if page and (changed := stale(page.read_text(encoding="utf-8"), measured)):
        found.append(f"{page}: run `python tools/house.py --write`, these changed: {', '.join(changed)}")
    return found


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder that holds the package")
    parser.add_argument("--package", default=OWN)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/house.md")
    parser.add_argument("--write", nargs="?", const=OWN, metavar="COLUMN", help="put the figures into this column")
    parser.add_argument("--check", action="store_true", help="exit with 1 where an aim is missed or the page is old")
    parser.add_argument("--no-walk", action="store_true", help="serve no request")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was found")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    chosen = arguments(given)
    measured = figures(chosen.source, chosen.package, chosen.source.resolve().parent)
    if chosen.package == OWN and not chosen.no_walk:
        with walk.tiny_checkpoint() as checkpoint:
            measured += walk_figures(walk.walks(source.read_package(chosen.source, OWN), checkpoint))
    print("\n".join(report(measured, verbose=chosen.verbose)))
    if chosen.write:
        page = chosen.page.read_text(encoding="utf-8")
        chosen.page.write_text(write_page(page, chosen.write, measured), encoding="utf-8")
    if not chosen.check:
        return 0
    found = problems(measured, chosen.page if chosen.package == OWN else None)
    print("\n".join(found) or "every aim holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
