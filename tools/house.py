"""The code base in figures: sizes, imports, layers, names, repeated declarations, and an image's call path.

``python tools/house.py`` prints this tree's; ``-v`` lists what was found. ``--check`` exits with 1 where a figure
misses a fixed limit, or is not the bound that docs/house.md has. ``--write`` lowers these bounds to what is found;
``--raise`` raises them too, in a commit that says why. ``--source DIR --package NAME`` measures another package,
without serving; ``--write COLUMN`` puts it into that column.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # run as a script, it measures the tree that it lies in

from tools import house_source as source  # noqa: E402

OWN = "trinity"
SMALL = 80  # lines
# Their settings are counted; names that say what is served, not how, occur everywhere.
OWNERS = ("trinity.instance.Instance", "trinity.pipeline.config.PipelineConfig")
NO_SETTINGS = {"address", "device", "dtype", "instances", "model", "name", "placement", "processor", "roles"}
STEP = 100  # lines and statements are bounded by the next hundred

PLACEMENTS = ("EPD", "1E1P1D")
PROMPT, TOKENS = "<image>\nWhat is this?", 4
SETTLE_S = 0.3  # after the last token, instances give back blocks and report once more
WALKS = 3


# ---------------------------------------------------------------- figures


class Figure(NamedTuple):
    """One measure.

    - ``text``: as printed.
    - ``value``: what is bounded by the page's figure; None: it only informs.
    - ``limit``: what the value may be at most, whatever the page says.
    - ``target``: where the figure is to go.
    - ``found``: the places behind it.
    - ``step``: the page bounds the value rounded up to a multiple of it.
    - ``slack``: by how much one measurement of the same tree may differ from another.
    """

    label: str
    text: str
    value: int | None = None
    limit: int | None = None
    target: int | None = None
    found: Sequence[str] = ()
    step: int = 1
    slack: int = 0

    @property
    def bound(self) -> int | None:
        return None if self.value is None else math.ceil(self.value / self.step) * self.step

    @property
    def missed(self) -> bool:
        return self.value is not None and self.limit is not None and self.value > self.limit

    @property
    def aim(self) -> str:
        """What the page's column of aims has: a limit that is enforced, or a target."""
        if self.limit is not None:
            return f"≤ {self.limit}, always"
        return "–" if self.target is None else f"≤ {self.target}"

    def line(self) -> str:
        return f"{self.label:52} {self.text}" + ("" if self.aim == "–" else f"  ({self.aim})")


def counted(label: str, found: Sequence[str], limit: int | None = None, target: int | None = None) -> Figure:
    """Count what was ``found``."""
    return Figure(label, f"{len(found):,}", len(found), limit, target, found)


def size_figures(modules: source.Modules, root: Path) -> list[Figure]:
    lengths = source.function_lengths(modules)
    median, most, longest = source.spread(lengths)
    lines = sum(module.lines for module in modules.values())
    statements = source.count_statements(modules)
    figures = [
        counted("files at the root", source.root_files(modules), limit=14),
        Figure("modules", f"{len(modules):,}", len(modules)),
        Figure("packages", f"{len(source.folders(modules)):,}"),
        Figure("lines", f"{lines:,}", lines, step=STEP),
        Figure("statements", f"{statements:,}", statements, step=STEP),
        Figure("function lines: median / p95 / max", f"{median:g} / {most} / {longest}"),
        Figure("functions over 50 lines", f"{source.longer_than(50, lengths)}"),
        Figure("files over 600 lines", f"{source.longer_than(600, [each.lines for each in modules.values()])}"),
        Figure("lines of the median function", f"{median:g}", math.ceil(median), limit=8),
    ]
    if (root / "tests").is_dir():
        tests, code = source.lines_with_text(root / "tests"), source.lines_with_text(root / "src")
        figures.append(
            Figure("lines of code beyond those of tests", f"{max(0, code - tests)}", max(0, code - tests), 0)
        )
    return figures


def import_figures(modules: source.Modules, root: Path) -> list[Figure]:
    package = source.root_of(modules)
    every, running = (source.import_edges(modules, type_only=type_only) for type_only in (True, False))
    edges = source.part_edges(every, modules, package)
    layers = [" ".join(layer) for layer in reversed(source.layers(source.part_edges(running, modules, package)))]
    contract = source.contract_layers(root / "pyproject.toml")
    inner = sorted(source.inner_layers(modules, running).items(), key=lambda each: -each[1])
    small, reads = source.small_modules(modules, every, SMALL), source.private_reads(modules)
    return [
        counted("layers, computed", layers, limit=15),
        Figure("layers, in the contract", str(contract or "–"), contract, limit=15),
        Figure(
            "import edges between packages", f"{len(edges)}", len(edges), found=[f"{a} → {b}" for a, b in sorted(edges)]
        ),
        Figure("imports that cross packages", f"{len(source.crossing(every, modules, package)):,}"),
        counted("modules in import cycles", source.in_cycles(running), limit=0),
        counted("… with those for types alone", source.in_cycles(every), limit=0),
        counted(f"modules under {SMALL} lines with one importer", small, target=25),
        counted("private names imported", source.private_imports(modules), limit=0),
        counted("private attributes of other objects", reads, target=30),
        Figure(
            "layers in the packages: sum / most",
            f"{sum(count for _, count in inner)} / {inner[0][1] if inner else 0}",
            sum(count for _, count in inner),
            found=[f"{name} {count}" for name, count in inner],
        ),
    ]


def name_figures(modules: source.Modules, root: Path) -> list[Figure]:
    repeated = [f"{name}: {', '.join(homes)}" for name, homes in source.repeated_names(modules).items()]
    documented, participles = list(source.docstrings(modules)), source.participle_functions(modules)
    bases = source.single_bases(modules, source.public_names(modules, root / "docs/site/reference"), root / "tests")
    places = source.declarations(modules, source.settings_of(modules, OWNERS) - NO_SETTINGS)
    told = sorted(([name, *found] for name, found in places.items()), key=lambda each: -len(each))
    counts = [len(each) - 1 for each in told]
    return [
        counted("private bases with one subclass", bases, limit=0),
        Figure(
            "places that declare a setting: median / most",
            f"{statistics.median(counts):g} / {counts[0]}" if counts else "–",
            sum(each - 1 for each in counts) if counts else None,  # a new setting has one
            found=[f"{name}: {', '.join(found)}" for name, *found in told],
        ),
        counted("names with two meanings", repeated, limit=0),
        counted("docstrings that begin by asking", source.asking_docstrings(modules), limit=0),
        Figure("docstrings", f"{len(documented):,}"),
        counted("modules named by a participle", source.participle_modules(modules), limit=0),
        Figure("functions named by a participle", f"{len(participles):,}", found=participles),
    ]


def figures(folder: Path, package: str, root: Path) -> list[Figure]:
    """Everything that the source of ``package`` below ``folder`` tells; ``root`` has its pyproject.toml."""
    modules = source.read_package(folder, package)
    return [*size_figures(modules, root), *import_figures(modules, root), *name_figures(modules, root)]


# ---------------------------------------------------------------- the call path of an image

Calls = Mapping[tuple[str | None, str], int]


class Recorder:
    """Counts calls by (calling module or None, called module) while ``recording()``.

    A call is one entry of a Python function or the resumption of a coroutine or generator, on any thread; its caller is
    the frame right below. Calls whose caller is outside the package, an event loop's for instance, enter a file but
    come from none.
    """

    def __init__(self, package: str) -> None:
        self._package, self._on = package, False
        self._seen: list[tuple[str | None, str]] = []  # appending is safe from several threads

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._on and event == "call" and (called := self._module(frame)):
            self._seen.append((self._module(frame.f_back), called))

    def _module(self, frame: FrameType | None) -> str | None:
        name = str(frame.f_globals.get("__name__")) if frame else ""
        return name if f"{name}.".startswith(f"{self._package}.") else None

    @contextmanager
    def hearing_threads(self) -> Iterator[None]:
        """Hear each thread that starts inside the block, when it comes to recording."""
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread, and those that were started to be heard."""
        self._on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._on = False

    def calls(self) -> Counter[tuple[str | None, str]]:
        return Counter(self._seen)


class Walk(NamedTuple):
    """Files that a request enters, and its calls between files of two packages and of one package."""

    files: int
    crossing: int
    within: int


def sum_up(calls: Calls, modules: source.Modules) -> Walk:
    """Sum up recorded calls. Each file at the root is a package of its own here."""
    package, total = source.root_of(modules), Counter[bool]()
    for (caller, called), times in calls.items():
        if caller and caller != called:
            crosses = source.part_of(caller, modules, package) != source.part_of(called, modules, package)
            total[crosses] += times
    return Walk(len({called for _, called in calls}), total[True], total[False])


async def _serve_image(placement: str, checkpoint: Path, recorder: Recorder) -> None:
    import numpy as np

    import trinity

    image: Any = np.random.default_rng(1).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    sampling = trinity.Sampling(ignore_eos=True)
    async with trinity.Pipeline(checkpoint, placement, dtype="float32") as pipe:
        with recorder.recording():
            await pipe.complete(trinity.Request(PROMPT, images=[image], max_tokens=TOKENS, sampling=sampling))
            await asyncio.sleep(SETTLE_S)


def record_image(placement: str, checkpoint: Path) -> Counter[tuple[str | None, str]]:
    """Record one image request of four tokens on ``placement``, from its submission until all is quiet again."""
    recorder = Recorder(OWN)
    with recorder.hearing_threads():
        asyncio.run(_serve_image(placement, checkpoint, recorder))
    return recorder.calls()


def measure_walks(modules: source.Modules, checkpoint: Path, times: int = WALKS) -> dict[str, Walk]:
    """Serve the image ``times`` times on each placement, and take the median of each figure."""
    found = {}
    for placement in PLACEMENTS:
        walks = [sum_up(record_image(placement, checkpoint), modules) for _ in range(times)]
        found[placement] = Walk(*(statistics.median_low(each) for each in zip(*walks, strict=True)))
    return found


@contextmanager
def tiny_checkpoint() -> Iterator[Path]:
    """Make a tiny LLaVA with random weights, in a folder that goes with the block."""
    from trinity.testing.checkpoints import build_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        yield build_checkpoint("llava", Path(folder) / "llava")


TARGETS = {"EPD": 75, "1E1P1D": 90}
SLACK = 3  # files: a timer may or may not be due


def walk_figures(walks: Mapping[str, Walk]) -> list[Figure]:
    """Make the figures of an image on each placement; threads' timing changes them by some percent."""
    measured = []
    for placement, each in walks.items():
        label = f"image on {placement}: files entered"
        measured.append(Figure(label, f"{each.files}", each.files, target=TARGETS.get(placement), slack=SLACK))
        measured.append(Figure(f"… calls across packages / inside, {placement}", f"{each.crossing} / {each.within}"))
    return measured


# ---------------------------------------------------------------- the page


def _table(page: str) -> tuple[int, list[list[str]]]:
    """Find the first table: the line at which it begins, its rows as cells. Raises ``ValueError`` if there is none."""
    lines = page.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("|")), None)
    if first is None:
        raise ValueError("the page has no table")
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return first, rows


def read_column(page: str, column: str) -> dict[str, str]:
    """Read ``column`` by the first cell of each row. Raises ``ValueError`` if there is no such column."""
    heads, _, *rows = _table(page)[1]
    if column not in heads:
        raise ValueError(f"the table has no column {column!r}: {', '.join(heads)}")
    return {row[0]: row[heads.index(column)] for row in rows}


def write_column(page: str, column: str, cells: Mapping[str, str]) -> str:
    """Put ``cells``, by the first cell of their row, into ``column``. Raises ``ValueError`` if one has no row."""
    if missing := set(cells) - set(read_column(page, column)):
        raise ValueError(f"the table has no row {', '.join(sorted(missing))}")
    first, rows = _table(page)
    at = rows[0].index(column)
    lines = page.splitlines()
    for number, row in enumerate(rows):
        if row[0] in cells:
            lines[first + number] = f"| {' | '.join([*row[:at], cells[row[0]], *row[at + 1 :]])} |"
    return "\n".join(lines) + "\n"


def read_bounds(page: str) -> dict[str, int]:
    """Read the bounds by the figure's label: the page's ``bound`` column."""
    cells = read_column(page, "bound")
    return {label: int(cell.replace(",", "")) for label, cell in cells.items() if cell.replace(",", "").isdigit()}


def write_page(page: str, column: str, measured: Sequence[Figure], *, raising: bool = False) -> str:
    """Renew the column of one tree; of this one, the aims too, and bounds that are lower now, or ``raising`` them."""
    page = write_column(page, column, {each.label: each.text for each in measured})
    if column != OWN:
        return page
    old = read_bounds(page)
    new = {
        each.label: f"{each.bound:,}"
        for each in measured
        if each.bound is not None and (raising or each.bound < old.get(each.label, math.inf))
    }
    page = write_column(page, "bound", new)
    return write_column(page, "aim", {each.label: each.aim for each in measured})


def problems(measured: Sequence[Figure], page: str | None) -> list[str]:
    """List limits that are missed and, of this tree, figures beyond the page's bounds or better than them."""
    found = [f"{each.label}: {each.text}, at most {each.limit}" for each in measured if each.missed]
    bounds = read_bounds(page) if page else {}
    for each in measured if page else ():
        bound = bounds.get(each.label)
        if each.bound is None or (bound is not None and abs(each.bound - bound) <= each.slack):
            continue
        if bound is not None and each.bound > bound:
            found.append(f"{each.label}: {each.value:,}, more than {bound:,}: lower it, or --raise it and say why")
        else:
            found.append(f"{each.label}: {each.value:,} is better than {bound}: lower the bound with --write")
    return found


# ---------------------------------------------------------------- the command


def report(measured: Sequence[Figure], *, verbose: bool) -> list[str]:
    lines = []
    for figure in measured:
        lines += [figure.line(), *([f"    {each}" for each in figure.found] if verbose else [])]
    return lines


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder that holds the package")
    parser.add_argument("--package", default=OWN, help="its dotted name")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/house.md")
    parser.add_argument("--write", nargs="?", const=OWN, metavar="COLUMN", help="put the figures into this column")
    parser.add_argument("--raise", dest="raising", action="store_true", help="with --write: raise bounds too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit or a bound does not hold")
    parser.add_argument("--no-walk", action="store_true", help="serve no request")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what was found")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    chosen = arguments(given)
    own = chosen.package == OWN
    measured = figures(chosen.source, chosen.package, chosen.source.resolve().parent)
    if own and not chosen.no_walk:
        with tiny_checkpoint() as checkpoint:
            measured += walk_figures(measure_walks(source.read_package(chosen.source, OWN), checkpoint))
    print("\n".join(report(measured, verbose=chosen.verbose)))
    if chosen.write:
        page = chosen.page.read_text(encoding="utf-8")
        written = write_page(page, chosen.write, measured, raising=chosen.raising)
        chosen.page.write_text(written, encoding="utf-8")
    if not chosen.check:
        return 0
    found = problems(measured, chosen.page.read_text(encoding="utf-8") if own else None)
    print("\n".join(found) or "every limit and bound holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
