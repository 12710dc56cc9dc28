"""The figures of the house, each seen to tell a made-up tree with the fault from one without."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from support.checkpoint_files import checkpoint
from tools import house, house_graph, house_page, house_source, house_walk, house_words

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


def test_rooms_are_folders_of_the_package_and_files_at_its_root(tmp_path: Path) -> None:
    modules = tree(tmp_path, errors="", core__state="", core__steps="")
    assert sorted(modules) == ["box", "box.core", "box.core.state", "box.core.steps", "box.errors"]
    assert [house_source.room(name, modules) for name in sorted(modules)] == [
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
def test_an_import_in_any_form_is_an_arrow_to_its_module(tmp_path: Path, line: str) -> None:
    modules = tree(tmp_path, a=line, core__state="")
    assert house_graph.import_arrows(modules, type_only=False) == {("box.a", "box.core.state")}


@pytest.mark.parametrize("line", ["from ..a import x", "from .. import a", "from . import x\nimport box.a"])
def test_leading_dots_count_from_the_module_that_imports(tmp_path: Path, line: str) -> None:
    arrows = house_graph.import_arrows(tree(tmp_path, a="", core__state=line), type_only=False)
    assert ("box.core.state", "box.a") in arrows


def test_a_module_that_names_itself_has_no_arrow(tmp_path: Path) -> None:
    assert house_graph.import_arrows(tree(tmp_path, a="import box.a"), type_only=True) == set()


def test_the_dot_of_a_package_is_itself(tmp_path: Path) -> None:
    modules = tree(tmp_path, core__state="x = 1")
    (tmp_path / "box" / "core" / "__init__.py").write_text("from .state import x")
    modules = house_source.read_package(tmp_path, "box")
    assert house_graph.import_arrows(modules, type_only=False) == {("box.core", "box.core.state")}


def test_what_is_imported_for_types_is_an_arrow_that_never_runs(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="if TYPE_CHECKING:\n    from box.b import x\nelse:\n    import box.c", b="", c="")
    assert house_graph.import_arrows(modules, type_only=True) == {("box.a", "box.b"), ("box.a", "box.c")}
    assert house_graph.import_arrows(modules, type_only=False) == {("box.a", "box.c")}


def test_arrows_between_rooms_are_counted_once(tmp_path: Path) -> None:
    modules = tree(
        tmp_path, a="import box.p.x, box.p.y", p__x="import box.p.y", p__y="import box.q.z", q__z="import os"
    )
    arrows = house_graph.import_arrows(modules, type_only=True)
    assert len(house_graph.crossing(arrows, modules)) == 3
    assert house_graph.room_arrows(arrows, modules) == {("a.py", "p/"), ("p/", "q/")}


def test_other_folders_of_the_project_are_rooms_too(tmp_path: Path) -> None:
    modules = tree(tmp_path, a="", p__x="")
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "gpu" / "run.py").write_text("from box import a\nfrom box.p.x import y\nimport box.a")
    found = house_graph.visiting_arrows(tmp_path, ["benchmarks", "tools"], modules)
    assert found == {("benchmarks/", "a.py"), ("benchmarks/", "p/")}


def test_layers_stand_above_all_that_they_reach_and_a_cycle_is_on_one() -> None:
    assert house_graph.layers([]) == []
    assert house_graph.layers([("a", "b"), ("b", "c"), ("a", "c")]) == [["c"], ["b"], ["a"]]
    assert house_graph.layers([("a", "b"), ("b", "a"), ("b", "c")]) == [["c"], ["a", "b"]]


def test_modules_in_a_cycle_are_named_and_no_others() -> None:
    assert house_graph.in_cycles([("a", "b"), ("b", "c")]) == []
    assert house_graph.in_cycles([("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]) == ["b", "c"]


def test_the_contract_is_read_from_the_project(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    assert house_graph.contract_layers(project) == 0
    project.write_text('[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["a : b", "c"]\n')
    assert house_graph.contract_layers(project) == 2
    project.write_text('[[tool.importlinter.contracts]]\ntype = "forbidden"\n')
    assert house_graph.contract_layers(project) == 0


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
    assert house_words.repeated_names(modules) == {"same": ["box.a", "box.b"]}


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
    assert house_words.repeated_names(tree(tmp_path, a=text, b="def same(): ...")) == {}


def test_a_logger_an_entry_point_and_private_names_may_recur(tmp_path: Path) -> None:
    text = "logger = getLogger(__name__)\ndef main(): ...\ndef _own(): ..."
    assert house_words.repeated_names(tree(tmp_path, a=text, b=text)) == {}


@pytest.mark.parametrize("start", ["What a step is", "Whether it ends", "``how`` many", "Which one", "Where it lies"])
def test_docstrings_that_ask_are_found_in_modules_classes_and_functions(tmp_path: Path, start: str) -> None:
    doc = f'"""{start}."""'
    modules = tree(tmp_path, a=f"{doc}\nclass A:\n    {doc}\n    def f(self):\n        {doc}\n")
    assert [line.rpartition("/")[2] for line in house_words.asking_docstrings(modules)] == [
        f"a.py:{line} {start}." for line in (1, 2, 4)
    ]


@pytest.mark.parametrize("start", ["Whatever comes", "Return what is left", "However", "Blocks; how many"])
def test_docstrings_that_begin_with_a_verb_or_noun_pass(tmp_path: Path, start: str) -> None:
    modules = tree(tmp_path, a=f'"""{start}."""\ndef f(): ...')
    assert house_words.asking_docstrings(modules) == []
    assert len(list(house_words.docstrings(modules))) == 1


@pytest.mark.parametrize("word", ["paced", "hosting", "told", "seen", "lacking", "watching", "planned"])
def test_participles_are_known(tmp_path: Path, word: str) -> None:
    modules = tree(tmp_path, **{word: f"def {word}(): ...", f"attention_{word}": f"def _{word}(): ..."})
    assert house_words.participle_modules(modules) == sorted([f"box.attention_{word}", f"box.{word}"])
    assert len(house_words.participle_functions(modules)) == 2


@pytest.mark.parametrize("word", ["routing", "sampling", "speed", "seed", "string", "ring", "read", "told_layers"])
def test_nouns_and_verbs_are_no_participles(tmp_path: Path, word: str) -> None:
    modules = tree(tmp_path, **{word: f"def {word}(): ...\ndef nothing_moved(): ..."})
    assert house_words.participle_modules(modules) == []
    assert house_words.participle_functions(modules) == []


def test_a_package_may_have_any_name_of_its_own(tmp_path: Path) -> None:
    module = tree(tmp_path, a="")["box.a"]
    modules = {"distributed": module, "distributed.shared": module}
    assert house_words.participle_modules(modules) == ["distributed.shared"]


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
    recorder = house_walk.Recorder("walked")
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
    assert house_walk.walk_figures(calls, modules) == house_walk.Walk(files=4, crossing=3, within=6, flat=2)


@pytest.mark.slow
def test_an_image_is_walked_through_this_tree() -> None:
    found = house_walk.walks(house_source.read_package(ROOT / "src", "trinity"), checkpoint("llava"))
    assert list(found) == ["EPD", "1E1P1D"]
    one, three = found.values()
    assert 20 < one.files < three.files < 145
    assert 0 < one.crossing < three.crossing < 400
    assert one.within < three.within
    labels = [figure.label for figure in house.walk_figures(found)]
    assert set(labels) <= set(house_page.read_column((ROOT / "docs/house.md").read_text("utf-8"), "trinity"))
    assert house.walk_figures(found)[2].text == str(three.files)


PAGE = """# A
| figure | trinity | aim | other |
|---|---|---|---|
| files | 1 | ≤ 2 | 7 |
| lines | 5 | – | 8 |

| figure | trinity |
|---|---|
| files | 9 |
"""


def test_a_column_is_written_into_the_first_table_alone() -> None:
    assert house_page.read_column(PAGE, "other") == {"files": "7", "lines": "8"}
    page = house_page.write_column(PAGE, "other", {"files": "3"})
    assert page == PAGE.replace("| 7 |", "| 3 |")
    for column, rows, error in (("none", {}, "no column 'none'"), ("other", {"folders": "1"}, "no row folders")):
        with pytest.raises(ValueError, match=error):
            house_page.write_column(PAGE, column, rows)
    with pytest.raises(ValueError, match="no table"):
        house_page.read_column("# A", "aim")


def test_the_page_says_where_it_is_older_than_the_tree(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    same, other = house.Figure("files", "1 of 9", 1, 2), house.Figure("files", "2", 2, 2)
    assert house.problems([same, house.plain("lines", 6)], page) == []
    assert "these changed: files" in house.problems([other], page)[0]
    assert house.problems([other], None) == []
    written = house.write_page(PAGE, "trinity", [other._replace(aim=3)])
    assert house.stale(written, [other]) == []
    assert house_page.read_column(written, "aim") == {"files": "≤ 3", "lines": "–"}


GOOD = {"a": '"""Sum."""\nfrom box.p.x import f\n', "p__x": "def f(): ..."}


def measured(root: Path, **files: str) -> dict[str, house.Figure]:
    tree(root, **files)
    return {each.label: each for each in house.figures(root, "box", root)}


def test_a_good_tree_misses_no_aim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [each for each in measured(tmp_path, **GOOD).values() if each.missed]
    assert house.main(["--source", str(tmp_path), "--package", "box", "--check"]) == 0
    assert "every aim holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ({f"f{number}": "" for number in range(14)}, "files at the root"),
        ({f"f{n}": f"import box.f{n + 1}" for n in range(15)} | {"f15": ""}, "layers, computed"),
        ({"a": "import box.b", "b": "import box.a"}, "modules in import cycles"),
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
    assert figure.value > (figure.aim or 0)
    given = ["--source", str(tmp_path), "--package", "box", "-v"]
    assert house.main(given) == 0
    assert f"    {figure.found[0]}" in capsys.readouterr().out
    assert house.main([*given, "--check"]) == 1
    assert f"{label}: {figure.text}, at most {figure.aim}" in capsys.readouterr().out


def test_a_contract_of_many_layers_misses_its_aim(tmp_path: Path) -> None:
    layers = ", ".join(f'"{number}"' for number in range(16))
    (tmp_path / "pyproject.toml").write_text(f'[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = [{layers}]\n')
    assert measured(tmp_path, **GOOD)["layers, in the contract"].missed


def test_the_page_has_a_row_for_every_figure_and_the_aims_of_the_tool() -> None:
    page = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    figures = house.figures(ROOT / "src", "trinity", ROOT)
    assert set(house_page.read_column(page, "trinity")) >= {each.label for each in figures}
    assert house.write_page(page, "trinity", []) == page
    aims = house_page.read_column(page, "aim")
    assert {each.label: aims[each.label] for each in figures} == house.aims(figures)


def test_figures_of_another_tree_go_into_their_column(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tree(tmp_path / "src", **GOOD)
    page = tmp_path / "house.md"
    page.write_text((ROOT / "docs/house.md").read_text(encoding="utf-8"))
    given = ["--source", str(tmp_path / "src"), "--package", "box", "--page", str(page), "--write", "h11"]
    assert house.main(given) == 0
    assert house_page.read_column(page.read_text(encoding="utf-8"), "h11")["modules"] == "4"
