"""Mutation testing of the cores with mutmut: how many mutants the cores' own fast tests kill, and which survive.

``make mutants`` runs all (pyproject.toml, ``[tool.mutmut]``, says what is mutated and by which tests).
``make mutants ARGS='trinity.placement*'`` runs those of one module.
``make mutants ARGS="--sample 'trinity.core.frontend*=400'"`` runs 400 of some, drawn at random.

Exits with 1 where fewer than 90 % are killed, where a survivor is not explained in docs/mutants.md, or where a share
that is recorded there has fallen. A mutant that hangs until its time is up counts as killed.

A reason there is a line ``- `function` `text`: why``: it stands for the survivors of functions whose name matches
(with ``*``) and in whose changed line the text is. Numbers of mutants are not used: they change with every edit.
A recorded share is a row ``| `functions` | killed/total |``: survivors of these functions need no reason.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import NamedTuple

TARGET = 90.0
KILLED = {"killed", "timeout", "segfault", "suspicious", "caught by type check"}
REASON = re.compile(r"- `([\w.*]+)` `(.+)`: .+")
SHARE = re.compile(r"\| `([\w.*]+)` \| (\d+)/(\d+) \|.*")

# What a sample leaves out, by the beginnings of names: whole clusters at random, which are minutes of each survivor.
LONG_TESTS = (
    "tests/core/instance/",
    "tests/core/migration/",
    "tests/core/test_deaths.py::test_every_interleaving_with_deaths_keeps_the_invariants",
    "tests/core/frontend/test_decode_moves.py::test_each_rule_is_needed",
    "tests/core/test_reused_ids.py::test_an_id_may_be_used_again_at_once",
    "tests/pipeline/test_request_map.py::test_each_request_has_its_result_once",
    "tests/remote/supervision/test_prepared_lives.py::test_closed_or_removed_at_any_moment_no_process_is_left",
    "tests/remote/supervision/test_supervisor_core.py::test_any_number_of_faults_at_random",
    "tests/remote/supervision/test_supervisor_core.py::test_any_two_faults_at_any_two_moments[D",
    "tests/remote/supervision/test_supervisor_core.py::test_any_two_faults_at_any_two_moments[P",
    "tests/remote/supervision/test_supervisor_core.py::test_any_two_faults_at_any_two_moments[launcher",
)

# Writes mutants/ and no more, which mutmut has no command for.
GENERATE = """
from mutmut import __main__ as mutmut
mutmut.set_mutant_under_test("mutant_generation")
mutmut.makedirs("mutants", exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants(2)
"""

# Runs the mutants that it reads, in their order. The command matches each of its names with every mutant, which takes
# minutes for hundreds of names, and begins with the quick ones: what is there when it is stopped is not of all alike.
RUN = """
import sys
from mutmut import __main__ as mutmut
drawn = {name: place for place, name in enumerate(sys.stdin.read().split())}
collect, load = mutmut.collect_source_file_mutation_data, mutmut.collect_or_load_stats
def collect_drawn(*, mutant_names):
    mutants, files = collect(mutant_names=())
    return [mutant for mutant in mutants if mutant[1] in drawn], files
def load_without_long(*given, **named):
    load(*given, **named)
    for tests in mutmut.state().tests_by_mangled_function_name.values():
        tests -= {test for test in tests if test.startswith(tuple(sys.argv[2:]))}
mutmut.collect_source_file_mutation_data, mutmut.collect_or_load_stats = collect_drawn, load_without_long
mutmut.estimated_worst_case_time = drawn.__getitem__
mutmut._run(tuple(drawn), int(sys.argv[1]))
"""


class Reason(NamedTuple):
    """Reason why mutants of these functions, with this in the changed line, may survive."""

    function: str
    text: str

    def covers(self, name: str, line: str) -> bool:
        return fnmatchcase(pretty(name).rpartition(" ")[0], self.function) and self.text in line


class Share(NamedTuple):
    """Share of mutants of these functions that was killed when it was recorded."""

    function: str
    killed: int
    total: int

    def covers(self, name: str) -> bool:
        return fnmatchcase(pretty(name).rpartition(" ")[0], self.function)

    def find_fall(self, killed: int, total: int) -> bool:
        """Whether ``killed`` of ``total`` is less than this by more than two standard errors of the difference."""
        both = (self.killed + killed) / (self.total + total)
        error = sqrt(both * (1 - both) * (1 / self.total + 1 / total))
        return self.killed / self.total - killed / total > 2 * error


def pretty(name: str) -> str:
    """``trinity.core.instance.steps.x__fill__mutmut_7`` is "core.instance.steps._fill 7"."""
    function, _, number = name.removeprefix("trinity.").rpartition("__mutmut_")
    module, _, function = function.rpartition(".")
    return f"{module}.{function.removeprefix('x').removeprefix('_').strip('ǁ').replace('ǁ', '.')} {number}"


def statuses(text: str) -> dict[str, str]:
    """Mutant to status, from what ``mutmut results --all true`` prints; those that were not run are left out."""
    rows = (line.strip().rpartition(": ") for line in text.splitlines() if "__mutmut_" in line)
    return {name: status for name, _, status in rows if status != "not checked"}


def unchecked(text: str) -> list[str]:
    """All mutants that ``mutmut results --all true`` prints, run or not."""
    return [line.strip().rpartition(": ")[0] for line in text.splitlines() if "__mutmut_" in line]


def draw(names: Iterable[str], samples: Sequence[str], seed: int) -> list[str]:
    """Draw mutants, so many of those that match as each of ``samples`` says: "trinity.core.frontend*=400".

    The draw looks at the function's own name and the mutant's number, not at module and class: a function that moves is
    drawn again, so that the shares before and after a move are mostly of the same mutants. A smaller sample is the
    beginning of a larger one.
    """

    def order(name: str) -> tuple[bytes, str]:
        own = pretty(name).rpartition(".")[2]
        return blake2b(f"{seed} {own}".encode(), digest_size=8).digest(), name

    every, drawn = sorted(names, key=order), set[str]()
    for sample in samples:
        pattern, _, count = sample.partition("=")
        drawn.update([name for name in every if fnmatchcase(name, pattern)][: int(count)])
    return sorted(drawn, key=order)


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


def shares(text: str) -> list[Share]:
    """The shares that docs/mutants.md records."""
    rows = (found.groups() for line in text.splitlines() if (found := SHARE.fullmatch(line)))
    return [Share(function, int(killed), int(total)) for function, killed, total in rows]


def changed_line(diff: str) -> str:
    """What a mutant has in the place of what was there, or what it is without."""
    lines = [line for line in diff.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    new, old = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "+-")
    return new or f"without {old}"


def report(
    found: Mapping[str, str],
    diffs: Mapping[str, str],
    known: Sequence[Reason],
    recorded: Sequence[Share] = (),
    *,
    whole: bool = True,
) -> tuple[list[str], bool]:
    """The lines to print, and whether all is well.

    ``diffs`` has the changed line of every survivor without a share; ``whole`` says whether all mutants were run.
    """
    rows = by_module(found)
    lines = [f"{name:24} {killed:5}/{total:<5} {100 * killed / total:5.1f} %" for name, killed, total in rows]
    rest, good = dict(found), True
    for share in recorded:
        part = {name: rest.pop(name) for name in found if name in rest and share.covers(name)}
        if part:
            killed, total = len(part) - len(survivors(part)), len(part)
            fallen = share.find_fall(killed, total)
            good = good and not fallen
            now, then = 100 * killed / total, 100 * share.killed / share.total
            less = ": that is less" if fallen else ""
            lines.append(f"{share.function}: {now:.1f} % are killed, {then:.1f} % before{less}")
    left = {name: [reason for reason in known if reason.covers(name, diffs[name])] for name in survivors(rest)}
    silent = [name for name, why in left.items() if not why]
    lines += [f"survives without a reason in docs/mutants.md: {pretty(name)}: {diffs[name]}" for name in silent]
    used = {reason for why in left.values() for reason in why}
    idle = [each for each in known if each not in used] if whole else []
    lines += [f"explains nothing any more: {each.function} {each.text}" for each in idle]
    if 100 * (len(rest) - len(left)) < TARGET * len(rest):
        lines.append(f"fewer than {TARGET:g} % are killed")
        good = False
    return lines, good and not silent


def mutmut(*arguments: str) -> str:
    found = subprocess.run([sys.executable, "-m", "mutmut", *arguments], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"mutmut {' '.join(arguments)} failed:\n{(found.stdout + found.stderr)[-4000:]}")
    return found.stdout


def run_sample(samples: Sequence[str], seed: int, children: int) -> dict[str, str]:
    """Run mutants that are drawn, and return their statuses.

    Those that have a status already are not run again: a sample goes on where it was stopped.
    """
    subprocess.run([sys.executable, "-c", GENERATE], check=True, stdout=subprocess.DEVNULL)
    printed = mutmut("results", "--all", "true")
    drawn, found = draw(unchecked(printed), samples, seed), statuses(printed)
    while left := [name for name in drawn if name not in found]:
        # mutmut ends with an error where a child ends that is none of its own; what it knew by then is kept.
        tried = subprocess.run(
            [sys.executable, "-c", RUN, str(children), *LONG_TESTS],
            input="\n".join(left),
            capture_output=True,
            text=True,
        )
        known = len(found)
        found = statuses(mutmut("results", "--all", "true"))
        if len(found) == known:
            raise SystemExit(f"mutmut runs none of {len(left)} mutants:\n{(tried.stdout + tried.stderr)[-4000:]}")
    return {name: found[name] for name in drawn}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="mutants to run, with *; all by default")
    parser.add_argument("--sample", action="append", metavar="NAMES=N", help="run so many of these, drawn at random")
    parser.add_argument("--seed", type=int, default=36, help="of the draw")
    parser.add_argument("--max-children", type=int, default=2, metavar="N", help="how many run at a time")
    given = parser.parse_args(arguments)
    text = Path("docs/mutants.md").read_text(encoding="utf-8")
    known, recorded = reasons(text), shares(text)
    if given.sample:
        found = run_sample(given.sample, given.seed, given.max_children)
    else:
        if not given.names:
            shutil.rmtree("mutants", ignore_errors=True)  # results are kept there, and do not know of changed tests
        mutmut("run", "--max-children", str(given.max_children), *given.names)
        found = statuses(mutmut("results", "--all", "true"))
    unexplained = [name for name in survivors(found) if not any(share.covers(name) for share in recorded)]
    diffs = {name: changed_line(mutmut("show", name)) for name in unexplained}
    lines, good = report(found, diffs, known, recorded, whole=not (given.sample or given.names))
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
