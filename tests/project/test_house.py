"""The figures of the house, each seen to tell a made-up tree with the fault from one without."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from support.checkpoint_files import checkpoint
from tools import house, house_source

ROOT = Path(house.__file__).parent.parent


def tree(root: Path, **files: str) -> house_source.Modules:
    """Modules of a package "box" with these files; ``a__b`` stands for ``a/b.py``."""
    for name, text in files.items():
        path = (root / "box" / name.replace("__", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (root / "box" / "__init__.py").touch()
    return house_source.read_package(root, "box")


def test_parts_are_folders_of_the_package_and_files_directly_in_it(tmp_path: Path) -> None:
    modules = tree(tmp_path, errors="", core__state="", core__steps="")
    assert sorted(modules) == ["box", "box.core", "box.core.state", "box.core.steps", "box.errors"]
    assert [house_source.part_of(name, modules, "box") for name in sorted(modules)] == [
        "__init__.py",
        "core/",
        "core/",
        "core/",
        "errors.py",
    ]
    assert house_source.root_files(modules) == ["__init__.py", "errors.py"]
    assert [folder.name for folder in house_source.folders(modules)] == ["box", "core"]


def test_tests_inside_a_package_are_left_out(tmp_path: Path) -> None:
    assert sorted(tree(tmp_path, a="", tests__test_a="")) == ["box", "box.a"]


def test_functions_are_measured_with_those_inside_others(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="def f():\n    def g():\n        pass\n    return g\n", b="async def h(): ...\n")
    lengths = house_source.function_lengths(modules)
    assert lengths == [1, 2, 4]
    assert house_source.spread(lengths) == (2, 4, 4)
    assert house_source.spread([]) == (0, 0, 0)
    assert house_source.spread(list(range(1, 101))) == (50.5, 95, 100)
    assert house_source.longer_than(2, lengths) == 1
    assert modules["box.a"].lines == 4


@pytest.mark.parametrize(
    "line",
    [
        "import box.core.state",
        "try:\n    pass\nexcept ImportError:\n    import box.core.state",
        "match 1:\n    case 1:\n        import box.core.state",
        "from box.core import state",
        "from box.core.state import State",
        "from .core.state import State",
        "from .core import state",
        "def f():\n    from box.core import state",
    ],
)
def test_an_import_in_any_form_is_an_edge_to_its_module(tmp_path: Path, line: str) -> None:
    modules = tree(tmp_path, a=line, core__state="")
    assert house_source.import_edges(modules, type_only=False) == {("box.a", "box.core.state")}


@pytest.mark.parametrize("line", ["from ..a import x", "from .. import a", "from . import x\nimport box.a"])
def test_leading_dots_count_from_the_module_that_imports(tmp_path: Path, line: str) -> None:
    edges = house_source.import_edges(tree(tmp_path, a="", core__state=line), type_only=False)
    assert ("box.core.state", "box.a") in edges


def test_a_module_that_names_itself_has_no_edge(tmp_path: Path) -> None:
    assert house_source.import_edges(tree(tmp_path, a="import box.a"), type_only=True) == set()


def test_the_dot_of_a_package_is_itself(tmp_path: Path) -> None:
    modules = tree(tmp_path, core__state="x = 1")
    (tmp_path / "box" / "core" / "__init__.py").write_text("from .state import x")
    modules = house_source.read_package(tmp_path, "box")
    assert house_source.import_edges(modules, type_only=False) == {("box.core", "box.core.state")}


def test_what_is_imported_for_types_is_an_edge_that_never_runs(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="if TYPE_CHECKING:\n    from box.b import x\nelse:\n    import box.c", b="", c="")
    assert house_source.import_edges(modules, type_only=True) == {("box.a", "box.b"), ("box.a", "box.c")}
    assert house_source.import_edges(modules, type_only=False) == {("box.a", "box.c")}


def test_edges_between_packages_are_counted_once(tmp_path: Path) -> None:
    modules = tree(
        tmp_path, a="import box.p.x, box.p.y", p__x="import box.p.y", p__y="import box.q.z", q__z="import os"
    )
    edges = house_source.import_edges(modules, type_only=True)
    assert len(house_source.crossing(edges, modules, "box")) == 3
    assert house_source.part_edges(edges, modules, "box") == {("a.py", "p/"), ("p/", "q/")}


@pytest.mark.parametrize(
    "files",
    [
        {"a": "from box.b import x", "b": "from box.a import y"},
        {"a": "import box.b", "b": "def f():\n    from box import a"},
        {"a": "from box.b import x", "b": "from box.c import x", "c": "from box.a import x"},
    ],
)
def test_a_cycle_is_found_lazy_or_not(tmp_path: Path, files: dict[str, str]) -> None:
    edges = house_source.import_edges(tree(tmp_path, **files), type_only=False)
    assert house_source.in_cycles(edges) == [f"box.{name}" for name in sorted(files)]


def test_layers_stand_above_all_that_they_reach_and_a_cycle_is_on_one() -> None:
    assert house_source.layers([]) == []
    assert house_source.layers([("a", "b"), ("b", "c"), ("a", "c")]) == [["c"], ["b"], ["a"]]
    assert house_source.layers([("a", "b"), ("b", "a"), ("b", "c")]) == [["c"], ["a", "b"]]


def test_modules_in_a_cycle_are_named_and_no_others() -> None:
    assert house_source.in_cycles([("a", "b"), ("b", "c")]) == []
    assert house_source.in_cycles([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == ["b", "c"]


def test_the_contract_is_read_from_the_project(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    assert house_source.contract_layers(project) == 0
    project.write_text('[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["a : b", "c"]\n')
    assert house_source.contract_layers(project) == 2
    project.write_text('[[tool.importlinter.contracts]]\ntype = "forbidden"\n')
    assert house_source.contract_layers(project) == 0


@pytest.mark.parametrize(
    "defined",
    [
        "def same(): ...",
        "async def same(): ...",
        "class same: ...",
        "same = 1",
        "same: int = 1",
        "other, same = 1, 2",
        "if sys:\n    same = 1",
        "try:\n    same = 1\nexcept ImportError:\n    pass",
        "try:\n    pass\nexcept ImportError:\n    same = None",
    ],
)
def test_a_name_that_two_modules_define_has_two_meanings(tmp_path: Path, defined: str) -> None:
    modules = tree(tmp_path, a=defined, b="def same(): ...")
    assert house_source.repeated_names(modules) == {"same": ["box.a", "box.b"]}


@pytest.mark.parametrize(
    "text",
    [
        "from box.c import same",
        "def _same(): ...",
        "class A:\n    same = 1",
        "same: int",
        "other.same = 1",
        "other[same] = 1",
        "same = TypeVar('same')",
        "def f():\n    same = 1",
    ],
)
def test_names_imported_private_inner_or_only_declared_are_no_second_meaning(tmp_path: Path, text: str) -> None:
    assert house_source.repeated_names(tree(tmp_path, a=text, b="def same(): ...")) == {}


def test_a_logger_an_entry_point_and_private_names_may_recur(tmp_path: Path) -> None:
    text = "logger = getLogger(__name__)\ndef main(): ...\ndef _own(): ..."
    assert house_source.repeated_names(tree(tmp_path, a=text, b=text)) == {}


@pytest.mark.parametrize("start", ["What a step is", "Whether it ends", "``how`` many", "Which one", "Where it lies"])
def test_docstrings_that_ask_are_found_in_modules_classes_and_functions(tmp_path: Path, start: str) -> None:
    doc = f'"""{start}."""'
    modules = tree(tmp_path, a=f"{doc}\nclass A:\n    {doc}\n    def f(self):\n        {doc}\n")
    assert [line.rpartition("/")[2] for line in house_source.asking_docstrings(modules)] == [
        f"a.py:{line} {start}." for line in (1, 2, 4)
    ]


@pytest.mark.parametrize("start", ["Whatever comes", "Return what is left", "However", "Blocks; how many"])
def test_docstrings_that_begin_with_a_verb_or_noun_pass(tmp_path: Path, start: str) -> None:
    modules = tree(tmp_path, a=f'"""{start}."""\ndef f(): ...')
    assert house_source.asking_docstrings(modules) == []
    assert len(list(house_source.docstrings(modules))) == 1


@pytest.mark.parametrize("word", ["paced", "hosting", "told", "seen", "lacking", "watching", "planned"])
def test_participles_are_known(tmp_path: Path, word: str) -> None:
    modules = tree(tmp_path, **{word: f"def {word}(): ...", f"attention_{word}": f"def _{word}(): ..."})
    assert house_source.participle_modules(modules) == sorted([f"box.attention_{word}", f"box.{word}"])
    assert len(house_source.participle_functions(modules)) == 2


@pytest.mark.parametrize("word", ["routing", "sampling", "speed", "seed", "string", "ring", "read", "told_layers"])
def test_nouns_and_verbs_are_no_participles(tmp_path: Path, word: str) -> None:
    modules = tree(tmp_path, **{word: f"def {word}(): ...\ndef nothing_moved(): ..."})
    assert house_source.participle_modules(modules) == []
    assert house_source.participle_functions(modules) == []


def test_a_package_may_have_any_name_of_its_own(tmp_path: Path) -> None:
    module = tree(tmp_path, a="")["box.a"]
    modules = {"distributed": module, "distributed.shared": module}
    assert house_source.participle_modules(modules) == ["distributed.shared"]


def test_calls_are_recorded_on_every_thread_with_the_module_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = "from walked.core.state import step\nimport threading\ndef go():\n    step()\n"
    front += "def aside():\n    thread = threading.Thread(target=step)\n    thread.start()\n    thread.join()\n"
    state = "def step():\n    inner()\ndef inner(): ...\n"
    for name, text in {"__init__": "", "front": front, "core/__init__": "", "core/state": state}.items():
        path = tmp_path / "walked" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("walked.front")
    recorder = house.Recorder("walked")
    before = sys.getprofile()
    with recorder.hearing_threads():
        module.aside()
        assert not recorder.calls()
        with recorder.recording():
            module.go()
            module.aside()
        module.go()
    assert sys.getprofile() is threading.getprofile() is before is None
    front, state = "walked.front", "walked.core.state"
    assert recorder.calls() == {(None, front): 2, (front, state): 1, (None, state): 1, (state, state): 2}


def test_a_walk_counts_files_and_calls_by_where_they_lead(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="", b="", p__x="", p__y="")
    calls = {(None, "box.a"): 9, ("box.a", "box.a"): 9, ("box.a", "box.b"): 2, ("box.b", "box.p.x"): 3}
    calls |= {("box.p.x", "box.p.y"): 4}
    assert house.sum_up(calls, modules) == house.Walk(files=4, crossing=5, within=4)


@pytest.mark.slow
def test_an_image_is_walked_through_this_tree() -> None:
    found = house.measure_walks(house_source.read_package(ROOT / "src", "trinity"), checkpoint("llava"), 1)
    assert list(found) == ["EPD", "1E1P1D"]
    one, three = found.values()
    assert 20 < one.files < three.files
    assert 0 < one.crossing < three.crossing < 500
    assert one.within < three.within
    measured = house.walk_figures(found)
    page = (ROOT / "docs/house.md").read_text("utf-8")
    assert {figure.label for figure in measured} <= set(house.read_column(page, "trinity"))
    assert house.problems(measured, page) == []


def test_an_import_through_a_lazy_door_leads_to_where_the_name_is_defined(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="from box.p import State", p__state="import box.a\nclass State: ...")
    (tmp_path / "box/p/__init__.py").write_text("if TYPE_CHECKING:\n    from box.p.state import State as State\n")
    edges = house_source.import_edges(house_source.read_package(tmp_path, "box"), type_only=True)
    assert edges == {("box.a", "box.p.state"), ("box.p.state", "box.a")}
    assert modules["box.p"].is_package


def test_small_modules_with_one_importer_are_listed_with_it(tmp_path: Path) -> None:
    files = {"small": "x = 1", "shared": "x = 1", "large": "x = 1\n" * 9}
    modules = tree(
        tmp_path, **files, a="import box.small, box.shared, box.large", b="import box.shared, box.a", c="import box.a"
    )
    edges = house_source.import_edges(modules, type_only=True)
    assert house_source.small_modules(modules, edges, 9) == ["box.small (1 lines): box.a"]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("class Only(Base): ...", True),
        ("from box.a import Base\nclass Only(Base): ...\ndef f(x: Base) -> Base: ...", True),
        ("class Only(a.Base[int]): ...\nBase.method(1)", True),
        ("class Only(Base): ...\nclass Second(Base): ...", False),
        ("class Only(Base): ...\nx = Base()", False),
        ("class Only(Base): ...\nTABLE = {1: Base}", False),
        ("class Only(Base): ...\nisinstance(x, Base)", False),
    ],
)
def test_a_class_that_only_one_other_inherits_is_a_private_base(tmp_path: Path, other: str, found: bool) -> None:
    modules = tree(tmp_path, a="class Base: ...\nclass Port(Protocol): ...", b=other + "\nclass Made(Port): ...")
    assert house_source.single_bases(modules, set()) == (["box.a.Base: box.b.Only"] if found else [])
    assert house_source.single_bases(modules, {"Base"}) == []
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/rig.py").write_text("class Rig(Base): ...")
    assert house_source.single_bases(modules, set(), tmp_path / "tests") == []


def test_public_names_are_those_of_packages_and_of_the_reference(tmp_path: Path) -> None:
    modules = tree(tmp_path, p__a="__all__ = ['No']")
    (tmp_path / "box/p/__init__.py").write_text("__all__ = ['One', 'Two']")
    (tmp_path / "page.rst").write_text(".. autoclass:: box.p.a.Three\n")
    modules = house_source.read_package(tmp_path, "box")
    assert house_source.public_names(modules, tmp_path) == {"One", "Two", "Three"}


def test_each_place_that_declares_a_setting_is_counted(tmp_path: Path) -> None:
    owner = "class Pipe(Base):\n    own: int = 1\n    def __init__(self, a, *, depth=1, _hidden=2): ..."
    other = "class Setup:\n    depth: int\ndef make(x, depth=1): ...\ndef use(depth): ...\nT = {'depth': 1}\nf(depth=3)"
    modules = tree(tmp_path, a="class Base:\n    kept: int\n" + owner, b=other)
    settings = house_source.settings_of(modules, ["box.a.Pipe", "box.c.None"])
    assert settings == {"kept", "own", "a", "depth"}
    found = house_source.declarations(modules, settings)
    assert found["depth"] == ["box.a:5", "box.b:1", "box.b:3", "box.b:5"]
    assert found["own"] == ["box.a:3"]


def test_private_names_of_others_are_found_and_own_ones_pass(tmp_path: Path) -> None:
    own = "self._a\ncls._b\nsuper()._c\nx.__d__\npoint._replace(x=1)\nos._exit(1)\ndef _f(): ..."
    modules = tree(tmp_path, a=own, b="from box.a import _f, g\nfrom os import _exit\nx._y = self._z._w")
    assert house_source.private_imports(modules) == ["box.b: box.a._f"]
    assert [each.rpartition(" ")[2] for each in house_source.private_reads(modules)] == ["x._y", "self._z._w"]


def test_statements_are_counted_without_docstrings(tmp_path: Path) -> None:
    assert house_source.count_statements(tree(tmp_path, a='"""A."""\ndef f():\n    "b"\n    return 1\n')) == 2


def test_layers_are_counted_in_each_package(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="import box.p.x", p__x="import box.p.y", p__y="import box.p.q.z", p__q__z="", r__s="")
    edges = house_source.import_edges(modules, type_only=False)
    assert house_source.inner_layers(modules, edges) == {"box.p": 3}


def test_a_part_of_a_larger_package_is_measured_alone(tmp_path: Path) -> None:
    tree(tmp_path, p__q__x="import box.p.q.y, box.a", p__q__y="", a="")
    modules = house_source.read_package(tmp_path, "box.p.q")
    assert set(modules) == {"box.p.q", "box.p.q.x", "box.p.q.y"}
    assert house_source.import_edges(modules, type_only=False) == {("box.p.q.x", "box.p.q.y")}


PAGE = """# A
| figure | trinity | bound | aim | other |
|---|---|---|---|---|
| files | 1 | 1 | ≤ 2 | 7 |
| lines | 5 | – | – | 8 |

| figure | trinity |
|---|---|
| files | 9 |
"""


def test_a_column_is_written_into_the_first_table_alone() -> None:
    assert house.read_column(PAGE, "other") == {"files": "7", "lines": "8"}
    page = house.write_column(PAGE, "other", {"files": "3"})
    assert page == PAGE.replace("| 7 |", "| 3 |")
    for column, rows, error in (("none", {}, "no column 'none'"), ("other", {"folders": "1"}, "no row folders")):
        with pytest.raises(ValueError, match=error):
            house.write_column(PAGE, column, rows)
    with pytest.raises(ValueError, match="no table"):
        house.read_column("# A", "aim")


def test_a_figure_may_neither_exceed_its_bound_nor_stay_below_it() -> None:
    same, more, fewer = (house.Figure("files", str(value), value) for value in (1, 2, 0))
    assert house.problems([same, house.Figure("lines", "6")], PAGE) == []
    assert house.problems([more], None) == []
    assert "more than 1: lower it, or --raise it" in house.problems([more], PAGE)[0]
    assert "lower the bound with --write" in house.problems([fewer], PAGE)[0]
    assert "lower the bound with --write" in house.problems([house.Figure("lines", "6", 6)], PAGE)[0]
    assert house.problems([more._replace(slack=1), fewer._replace(slack=1)], PAGE) == []
    assert house.problems([same._replace(step=100)], PAGE.replace("| 1 | 1 |", "| 1 | 100 |")) == []


def test_bounds_are_lowered_and_raised_only_on_demand() -> None:
    more, fewer = house.Figure("files", "2", 2, target=9), house.Figure("files", "0", 0)
    assert house.read_bounds(house.write_page(PAGE, "trinity", [more])) == {"files": 1}
    assert house.read_bounds(house.write_page(PAGE, "trinity", [more], raising=True)) == {"files": 2}
    assert house.read_bounds(house.write_page(PAGE, "trinity", [fewer])) == {"files": 0}
    assert house.read_column(house.write_page(PAGE, "trinity", [more]), "aim") == {"files": "≤ 9", "lines": "–"}
    other = house.write_page(PAGE, "other", [fewer])
    assert other == PAGE.replace("| 7 |", "| 0 |")


GOOD = {"a": '"""Sum."""\nfrom box.p.x import f\n', "p__x": "def f(): ..."}


def measured(root: Path, **files: str) -> dict[str, house.Figure]:
    tree(root, **files)
    return {each.label: each for each in house.figures(root, "box", root)}


def test_a_good_tree_misses_no_aim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [each for each in measured(tmp_path, **GOOD).values() if each.missed]
    assert house.main(["--source", str(tmp_path), "--package", "box", "--check"]) == 0
    assert "every limit and bound holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ({f"f{number}": "" for number in range(14)}, "files at the root"),
        ({f"f{n}": f"import box.f{n + 1}" for n in range(15)} | {"f15": ""}, "layers, computed"),
        ({"a": "import box.b", "b": "import box.a"}, "modules in import cycles"),
        (
            {"a": "if TYPE_CHECKING:\n    import box.b", "b": "import box.a"},
            "… with those for types alone",
        ),
        ({"a": "X = 1", "b": "X = 2"}, "names with two meanings"),
        ({"a": '"""What it is."""'}, "docstrings that begin by asking"),
        ({"told": ""}, "modules named by a participle"),
    ],
)
def test_a_fault_misses_its_aim_and_is_listed(
    tmp_path: Path, files: dict[str, str], label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = measured(tmp_path, **files)[label]
    assert figure.missed
    assert (figure.value or 0) > (figure.limit or 0)
    given = ["--source", str(tmp_path), "--package", "box", "-v"]
    assert house.main(given) == 0
    assert f"    {figure.found[0]}" in capsys.readouterr().out
    assert house.main([*given, "--check"]) == 1
    assert f"{label}: {figure.text}, at most {figure.limit}" in capsys.readouterr().out


def test_functions_that_are_long_and_code_without_tests_miss_their_limits(tmp_path: Path) -> None:
    found = measured(tmp_path, a="def f():\n" + "    x = 1\n" * 8)
    assert found["lines of the median function"].missed
    assert "lines of code beyond those of tests" not in found
    (tmp_path / "src").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/a.py").write_text("x = 1\ny = 1\n")
    (tmp_path / "tests/test_a.py").write_text("x = 1\n\n\n")
    assert measured(tmp_path, **GOOD)["lines of code beyond those of tests"].value == 1


def test_a_contract_of_many_layers_misses_its_aim(tmp_path: Path) -> None:
    layers = ", ".join(f'"{number}"' for number in range(16))
    (tmp_path / "pyproject.toml").write_text(f'[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = [{layers}]\n')
    assert measured(tmp_path, **GOOD)["layers, in the contract"].missed


def test_the_page_has_a_row_for_every_figure_and_the_aims_of_the_tool() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    figures = house.figures(ROOT / "src", "trinity", ROOT)
    assert set(house.read_column(page, "trinity")) >= {each.label for each in figures}
    assert house.write_page(page, "trinity", []) == page
    aims = house.read_column(page, "aim")
    assert {each.label: aims[each.label] for each in figures} == {each.label: each.aim for each in figures}


def test_figures_of_another_tree_go_into_their_column(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tree(tmp_path / "src", **GOOD)
    page = tmp_path / "house.md"
    page.write_text((ROOT / "docs/house.md").read_text(encoding="utf-8"))
    given = ["--source", str(tmp_path / "src"), "--package", "box", "--page", str(page), "--write", "h11"]
    assert house.main(given) == 0
    assert house.read_column(page.read_text(encoding="utf-8"), "h11")["modules"] == "4"
