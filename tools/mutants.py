"""Mutation testing of the cores with mutmut: how many mutants the cores' own fast tests kill, and which survive.

``make mutants`` runs all (pyproject.toml, ``[tool.mutmut]``, says what is mutated and by which tests);
``make mutants ARGS='trinity.placement*'`` runs those of one module. Exits with 1 where fewer than 90 % are killed, or
where a survivor is not explained in docs/mutants.md. A mutant that hangs until its time is up counts as killed.

A reason there is a line ``- `function` `text`: why``: it stands for the survivors of functions whose name matches
(with ``*``) and in whose changed line the text is. Numbers of mutants are not used: they change with every edit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

TARGET = 90.0
KILLED = {"killed", "timeout", "segfault", "suspicious", "caught by type check"}
REASON = re.compile(r"- `([\w.*]+)` `(.+)`: .+")


class Reason(NamedTuple):
    """Reason why mutants of these functions, with this in the changed line, may survive."""

    function: str
    text: str

    def covers(self, name: str, line: str) -> bool:
        return fnmatchcase(pretty(name).rpartition(" ")[0], self.function) and self.text in line


def pretty(name: str) -> str:
    """``trinity.core.instance.steps.x__fill__mutmut_7`` is "core.instance.steps._fill 7"."""
    function, _, number = name.removeprefix("trinity.").rpartition("__mutmut_")
    module, _, function = function.rpartition(".")
    return f"{module}.{function.removeprefix('x').removeprefix('_').strip('ǁ').replace('ǁ', '.')} {number}"


def statuses(text: str) -> dict[str, str]:
    """Mutant to status, from what ``mutmut results --all true`` prints; those that were not run are left out."""
    rows = (line.strip().rpartition(": ") for line in text.splitlines() if "__mutmut_" in line)
    return {name: status for name, _, status in rows if status != "not checked"}


def by_module(found: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """(module, killed, total) of each module, and of all."""
    total: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    for name, status in found.items():
        for module in (name.removeprefix("trinity.").rpartition(".")[0], "all"):
            total[module] += 1
            killed[module] += status in KILLED
    return [(module, killed[module], total[module]) for module in sorted(total, key=lambda each: (each == "all", each))]


def survivors(found: Mapping[str, str]) -> list[str]:
    return [name for name, status in found.items() if status not in KILLED]


def reasons(text: str) -> list[Reason]:
    """The reasons that docs/mutants.md gives."""
    return [Reason(*found.groups()) for line in text.splitlines() if (found := REASON.fullmatch(line))]


def changed_line(diff: str) -> str:
    """What a mutant has in the place of what was there, or what it is without."""
    lines = [line for line in diff.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    new, old = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "+-")
    return new or f"without {old}"


def report(found: Mapping[str, str], diffs: Mapping[str, str], known: Sequence[Reason]) -> tuple[list[str], bool]:
    """The lines to print, and whether all is well. ``diffs``: the changed line of every survivor."""
    rows = by_module(found)
    lines = [f"{name:24} {killed:5}/{total:<5} {100 * killed / total:5.1f} %" for name, killed, total in rows]
    left = {name: [reason for reason in known if reason.covers(name, diffs[name])] for name in survivors(found)}
    silent = [name for name, why in left.items() if not why]
    lines += [f"survives without a reason in docs/mutants.md: {pretty(name)}: {diffs[name]}" for name in silent]
    used = {reason for why in left.values() for reason in why}
    lines += [f"explains nothing any more: {each.function} {each.text}" for each in known if each not in used]
    _, killed, total = rows[-1]
    if 100 * killed < TARGET * total:
        lines.append(f"fewer than {TARGET:g} % are killed")
    return lines, not silent and 100 * killed >= TARGET * total


def mutmut(*arguments: str) -> str:
    found = subprocess.run([sys.executable, "-m", "mutmut", *arguments], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"mutmut {' '.join(arguments)} failed:\n{(found.stdout + found.stderr)[-4000:]}")
    return found.stdout


def main(names: list[str]) -> int:
    if not names:
        shutil.rmtree("mutants", ignore_errors=True)  # results are kept there, and do not know of changed tests
    mutmut("run", "--max-children", "2", *names)
    found = statuses(mutmut("results", "--all", "true"))
    diffs = {name: changed_line(mutmut("show", name)) for name in survivors(found)}
    known = reasons(Path("docs/mutants.md").read_text(encoding="utf-8"))
    lines, good = report(found, diffs, known)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
