"""Measures functions and tests: exits with 1 and a list where the median function or the tests are out of proportion.

Lines of a function run from its ``def`` to its end. Lines compared between tests and code are those with text.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

MEDIAN_LINES = 8


def python_files(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function in the file, nested ones too."""
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path}:{found.lineno} {found.name}", (found.end_lineno or found.lineno) - found.lineno + 1


def text_lines(paths: Iterable[Path]) -> int:
    return sum(1 for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def report(root: Path) -> tuple[str, list[str]]:
    """The figures in one line, and what breaks a limit."""
    code, tests = python_files(root, "src"), python_files(root, "tests")
    problems = []
    lengths = [length for path in code for _, length in functions(path)]
    median = statistics.median(lengths) if lengths else 0
    code_lines, test_lines = text_lines(code), text_lines(tests)
    if median > MEDIAN_LINES:
        problems.append(f"src: the median function has {median} lines, at most {MEDIAN_LINES}")
    if test_lines < code_lines:
        problems.append(f"tests: {test_lines} lines for {code_lines} lines of code, at least as many")
    figures = (
        f"{len(lengths)} functions of {median} lines at the median; {code_lines} lines of code, {test_lines} of tests"
    )
    return figures, problems


def main(root: Path) -> int:
    figures, problems = report(root)
    print("\n".join([figures, *problems]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
