"""The checks of documents, each shown to fail on what it is for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools import check_docs, module_list
from tools.names import Names

SOURCE = {
    "pyproject.toml": '[project]\nname = "x"\n[project.entry-points."trinity.plugins"]\n',
    "src/trinity/__init__.py": '"""All."""\nif TYPE_CHECKING:\n    from trinity.a import Public as Public\n',
    "src/trinity/a.py": '"""Module a."""\nLIMIT: int = 3\nclass Public:\n    def x(self):\n        self.held = 1\n',
    "src/trinity/p/__init__.py": '"""Package p."""',
    "src/trinity/p/b.py": '"""Module b.\n\nMore."""\ntry:\n    import x\nexcept ImportError:\n    x = None\n',
    "src/trinity/_native.pyi": "",
    "csrc/deep/sum.cpp": "",
}
GOOD = {
    **SOURCE,
    "README.md": "# A b\n[docs](docs/structures.md) [head](#a-b) [far](https://example.org/x)\n```sh\n# no head\n```",
    "docs/structures.md": "- `p/`: many.",
    "docs/decisions/0001.md": "`a.py`, `trinity/a.py`, `deep/sum.cpp`, `sum*.cpp`, trinity.p.b.x, trinity.a.Public",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"README.md": "[gone](gone.md)"}, "no file gone.md"),
        ({"README.md": "```md\n[gone](gone.txt)\n```"}, ""),
        ({"docs/structures.md": "- `p/`: many. [x](../README.md#b-a)"}, "no heading for ../README.md#b-a"),
        (
            {"docs/structures.md": "- `p/`: many. [x](../README.md#no-head)"},
            "no heading for ../README.md#no-head",
        ),
        ({"docs/structures.md": "- `p/`: one.\n- `gone/`: gone."}, "gone/ is not there any more"),
        ({"docs/structures.md": "nothing"}, "no line for p/"),
        ({"src/trinity/p/q/__init__.py": ""}, "no line for p/q/"),
        ({"src/trinity/p/q/r/__init__.py": ""}, ""),
        ({"src/trinity/p/q/__init__.py": "", "docs/structures.md": "- `p/`: many.\n- `p/q/`: one."}, ""),
        ({"src/trinity/q/__init__.py": ""}, "no line for q/"),
        ({"src/trinity/c.py": "x = 1"}, "trinity.c: no docstring"),
        ({"docs/a.md": "see ``trinity.gone.x``"}, "docs/a.md:1: there is no trinity.gone.x"),
        ({"docs/site/a.rst": "\n.. autoclass:: trinity.Gone"}, "docs/site/a.rst:2: there is no trinity.Gone"),
        ({"src/trinity/a.py": '"""As ``trinity.p.gone``."""'}, "src/trinity/a.py:1: there is no trinity.p.gone"),
        ({"examples/a.ipynb": '["import trinity.gone"]'}, "there is no trinity.gone"),
        ({"CHANGELOG.md": "a\n" + "<" * 7 + " HEAD\nb"}, "CHANGELOG.md: a merge has left its marks"),
        ({"tools/a.sh": "\n" + ">" * 7 + " 7820b7ff"}, "a.sh: a merge has left its marks"),
        ({"docs/a.md": "in `gone/a.py`"}, "there is no gone/a.py"),
        ({"docs/a.md": "a\n```py\nb\n```\n`GoneClass.run`"}, "docs/a.md:5: nothing is called GoneClass"),
        ({"docs/a.md": "with `gone_word=3`"}, "nothing is called gone_word"),
        ({"docs/a.md": "`Public(held=...)`, `own_word`, GoneClass, `plain`\n```py\nown_word = 1\n```"}, ""),
        ({"CHANGELOG.md": "`trinity.old` is now `trinity.new`"}, ""),
        ({"src/trinity/b.py": f'"""As in paper {3:03}, table 3."""'}, "003 is no source"),
        ({"tests/a.py": f"# reserved first ({1:03}: two-stage)"}, "001 is no source"),
        ({"csrc/a.cpp": f"// EPDServe ({2:03}, 3.2.3)"}, "002 is no source"),
        ({"benchmarks/a.py": f"# TriInfer {0:03}, 4.2"}, "000 is no source"),
        ({"docs/b.md": "EPD-Serve 3.3, f(0.001), (1,000), (0016), 0.004 (0.004)"}, ""),
        ({"src/trinity/b.py": '"""As design.md, section 1, says."""'}, "names design.md"),
        ({"docs/b.md": "as ../shared/notes.md says"}, "names ../shared/notes.md"),
        ({"examples/b.py": "# ../prototypes/core.py does so"}, "names ../prototypes/core.py"),
        ({"examples/b.py": "# ../src/trinity/a.py does so"}, ""),
        ({"docs/papers.md": "Algorithm 1 (`a.py`, `p/`, `gone.py`), `src/trinity`"}, "no gone.py"),
        ({"docs/b.md": "see structures.md, docs/structures.md, https://example.org/x.md and ../README.md"}, ""),
        ({"tests/a.py": "path = 'made-up.md'"}, ""),
    ],
)
def test_documents_that_fell_behind_are_named(
    tmp_path: Path, change: dict[str, str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_docs.main(write(tmp_path, GOOD | change)) == bool(problem)
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("trinity.Public, trinity.a.LIMIT, trinity.p, trinity.p.b. The end.", []),
        ("the entry point trinity.plugins, trinity._native and trinity.a.Public.held", []),
        ("trinity.a.Public.lost and trinity.a.limit", ["trinity.a.Public.lost", "trinity.a.limit"]),
        ("trinity.p.b.serve_{name}, trinity.p.* and pytrinity.x", []),
        ("trinity.b", ["trinity.b"]),
        ("from trinity.a import LIMIT, Gone as Here, Public\nfrom trinity import Public, p", ["trinity.a.Gone"]),
        ("b.py in p/b.py, ../p/b.py, https://example.org/c.py, test_*.py", []),
        ("src/trinity/p/c.py, c.hpp", ["src/trinity/p/c.py", "c.hpp"]),
    ],
)
def test_names_of_trinity_are_looked_up_in_the_source(tmp_path: Path, text: str, dead: list[str]) -> None:
    assert list(Names(write(tmp_path, SOURCE)).dead(text)) == dead


def test_members_that_a_class_may_inherit_are_not_judged(tmp_path: Path) -> None:
    names = Names(write(tmp_path, SOURCE | {"src/trinity/a.py": "class Public(Base):\n    pass\n"}))
    assert list(names.dead("trinity.a.Public.anything")) == []


def test_each_module_is_listed_with_its_first_line(tmp_path: Path) -> None:
    write(tmp_path, SOURCE | {"src/trinity/q/__init__.py": "", "src/trinity/q/c.py": "x = 1"})
    page = module_list.page(tmp_path / "src" / "trinity")
    assert page.startswith("# Modules\n")
    assert "## `trinity`\n\nAll.\n\n- `trinity.a`: Module a.\n" in page
    assert "## `trinity.p`\n\nPackage p.\n\n- `trinity.p.b`: Module b.\n" in page
    assert "## `trinity.q`\n\n- `trinity.q.c`: \n" in page
    assert module_list.undescribed(tmp_path / "src" / "trinity") == ["trinity.q.c"]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git: documents are then found by folder")
def test_what_git_ignores_is_no_document_of_the_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make bench-peers` installs whole engines, with documents of theirs, into the checkout."""
    broken = {"peers-here/engine/README.md": "[gone](gone.md)", ".venv2/lib/NOTES.md": "as design.md says"}
    write(tmp_path, GOOD | broken | {".gitignore": "/peers-here/\n.venv2/\n"})
    assert check_docs.main(tmp_path) == 1, "without git, only folders known by name are left out"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert check_docs.main(tmp_path) == 0, capsys.readouterr().out
    write(tmp_path, {"docs/new.md": "[gone](gone.md)"})
    assert check_docs.main(tmp_path) == 1, "a new document is the project's before it is committed"
