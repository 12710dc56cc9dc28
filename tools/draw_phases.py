"""Draw the phases of a request, and which follow which, into docs/phases.md: ``python tools/draw_phases.py``.

All between the page's two markers comes from ``MOVES`` of ``trinity.core.instance.phases``;
tests/core/instance/test_phases.py fails where it does not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trinity.core.instance.phases import ENDED, MOVES, SPAN, Phase

PAGE = Path("docs/phases.md")
BEGIN, END = "<!-- drawn by tools/draw_phases.py -->", "<!-- end of what is drawn -->"


def diagram() -> list[str]:
    """Every phase with those that follow it, without the ends that each has."""
    wide = max(len(phase.name) for phase in Phase)
    rows = {before: [after.name for after, why in MOVES[before].items() if why != ENDED] for before in Phase}
    return [
        "```text",
        *(f"{before.name:{wide}} → {', '.join(names)}" for before, names in rows.items() if names),
        "```",
    ]


def phases() -> list[str]:
    """The phases with the span of the request's record that their time belongs to."""
    lines = ["| phase | the request | span |", "|---|---|---|"]
    return lines + [f"| {phase.name} | {phase.value} | {SPAN.get(phase, '')} |" for phase in Phase]


def moves() -> list[str]:
    """One row for each move."""
    lines = ["| from | to | when |", "|---|---|---|"]
    for before, followers in MOVES.items():
        lines += [f"| {before.name} | {after.name} | {why} |" for after, why in followers.items()]
    return lines


def drawn(page: str) -> str:
    """The page with what is between its markers drawn anew. Raises ``ValueError`` where it has no markers."""
    head, _, rest = page.partition(f"{BEGIN}\n")
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"the page needs a line {BEGIN} and below it a line {END}")
    parts = "\n\n".join("\n".join(part) for part in (diagram(), phases(), moves()))
    return f"{head}{BEGIN}\n{parts}\n{END}{tail}"


def main(root: Path) -> int:
    page = root / PAGE
    page.write_text(drawn(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
