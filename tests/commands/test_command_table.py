"""``trinity``: the table of subcommands, their help, and what a terminal sees of errors."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import trinity
from trinity.commands import COMMANDS, Subcommand, main
from trinity.errors import DISTRIBUTION, TrinityError

HEAVY = ["torch", "transformers", "numpy", "anyio", "asyncio", "PIL", "msgspec", "starlette"]


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys; from trinity.commands import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert all(f"  {name:<12}{each.summary}" in run.stdout for name, each in COMMANDS.items())
    loaded = run.stdout.splitlines()[-1]
    assert not [name for name in HEAVY if f"'{name}'" in loaded]
    assert not [each.module for each in COMMANDS.values() if f"'{each.module}'" in loaded]


def test_python_m_trinity_is_the_same() -> None:
    run = subprocess.run([sys.executable, "-m", "trinity", "--version"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].split() == [DISTRIBUTION, trinity.__version__]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert said.startswith(f"usage: trinity {name}")
    assert "example" in said
    assert f"  trinity {name}" in said or f" trinity {name} " in said.partition("example")[2]
    assert import_module(COMMANDS[name].module).main.__doc__


@pytest.mark.parametrize("arguments", [[], ["sevre"], ["--plan"]])
def test_what_is_no_command_ends_with_2_and_the_list(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = "".join(capsys.readouterr())
    assert f"there are {', '.join(COMMANDS)}" in said
    assert not arguments or arguments[0] in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["plan", "qwen2-vl-7b", "--trace", "nowhere.jsonl", "--slo", "2,0.08"], "cannot read nowhere.jsonl"),
        (["plan", "qwen2-vl-7b", "--trace", "servegen-image-1h", "--slo", "2,0.1", "--device", "H1000"], "H1000"),
        (["check", "--weights", "nowhere"], "nowhere"),
    ],
)
def test_an_error_is_one_line_and_2(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert problem in said.err
    assert said.err.count("\n") == 1


def test_version_says_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows[DISTRIBUTION] == trinity.__version__
    assert rows["torch"] == import_module("torch").__version__
    assert {"python", "transformers", "numpy"} <= rows.keys()


def ending(error: BaseException | None) -> ModuleType:
    """A subcommand's module that ends so."""
    module = ModuleType("ending")

    def main(arguments: list[str]) -> int:
        print(json.dumps(arguments))
        if error is not None:
            raise error
        return 3

    module.main = main  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 3, ""),
        (KeyboardInterrupt(), 130, ""),
        (TrinityError("a line\nand another"), 2, "trinity ending: a line and another\n"),
    ],
)
def test_every_end_has_its_code(
    error: BaseException | None,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ending", ending(error))
    monkeypatch.setitem(COMMANDS, "ending", Subcommand("ending", "end"))
    assert main(["ending", "--with", "this"]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ('["--with", "this"]\n', said)


def test_a_missing_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "ending", Subcommand("no_such_library", "end", "plot"))
    assert main(["ending"]) == 2
    said = "trinity ending: this command needs no_such_library: pip install 'trinity-epd[plot]'\n"
    assert capsys.readouterr().err == said
    monkeypatch.setitem(COMMANDS, "ending", Subcommand("trinity.no_such_module", "end", "plot"))
    with pytest.raises(ModuleNotFoundError):
        main(["ending"])


def test_an_error_is_red_in_a_terminal_unless_colours_are_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    main(["check", "--weights", "nowhere"])
    monkeypatch.setitem(sys.modules, "ending", ending(TrinityError("no")))
    monkeypatch.setitem(COMMANDS, "ending", Subcommand("ending", "end"))
    capsys.readouterr()
    main(["ending"])
    assert capsys.readouterr().err == "\x1b[31mtrinity ending: no\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    main(["ending"])
    assert capsys.readouterr().err == "trinity ending: no\n"


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m trinity version | true"
    run = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr
