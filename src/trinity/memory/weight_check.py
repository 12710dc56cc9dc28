"""Command: ``trinity check --weights MODEL`` prints a digest of each file of a checkpoint, or compares them.

    trinity check --weights MODEL > digests
    trinity check --weights MODEL --digest digests

Lines are those of ``sha256sum``, in any order: a flipped bit, a file that is missing and one too many are told by name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity.errors import ConfigError
from trinity.memory.weight_digests import hash_file, list_weight_files

LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
MAX_DIGESTS_BYTES = 16 << 20
_EXAMPLE = """example:
  trinity check --weights path/to/llava > digests
  trinity check --weights path/to/llava --digest digests"""


def read_digests(path: Path) -> dict[str, str]:
    """Read lines of ``sha256sum``: digests by file name. Raises ``ConfigError`` for any other line."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(MAX_DIGESTS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        parts = LINE.fullmatch(line)
        if parts is None:
            raise ConfigError(f"{path}, line {number}: {line!r:.80} is no line of sha256sum: 64 hex digits and a name")
        found[Path(parts[2]).name] = parts[1].lower()
    if not found:
        raise ConfigError(f"{path} has no digests; make it with python -m trinity.check --weights MODEL")
    return found


def compare(directory: Path, expected: dict[str, str]) -> list[str]:
    """Hash every file and say of each that differs, is missing or is not expected what is wrong with it."""
    files = {path.name: path for path in list_weight_files(directory)}
    problems = [f"{name}: missing" for name in sorted(expected.keys() - files.keys())]
    problems += [f"{name}: not in the digests" for name in sorted(files.keys() - expected.keys())]
    for name in sorted(expected.keys() & files.keys()):
        found = hash_file(files[name])
        if found != expected[name]:
            problems.append(f"{name}: differs, {found} and not {expected[name]}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or compare the digests of a checkpoint's files; 1 if any differs, 2 if the question is wrong."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trinity check", description=main.__doc__, epilog=_EXAMPLE, formatter_class=formatter
    )
    parser.add_argument("--weights", required=True, type=Path, help="a checkpoint's directory")
    parser.add_argument("--digest", type=Path, help="a file of digests to compare with")
    given = parser.parse_args(arguments)
    try:
        files = list_weight_files(given.weights)
        if not files:
            raise ConfigError(f"{given.weights} has no config.json and no weights")
        if given.digest is None:
            for path in files:
                print(f"{hash_file(path)}  {path.name}", flush=True)
            return 0
        problems = compare(given.weights, read_digests(given.digest))
    except (ConfigError, OSError) as error:
        print(f"trinity: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(problem)
    print(f"{len(problems)} of {len(files)} files differ" if problems else f"{len(files)} files are as they should be")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
