"""Prints what hostile media were tried against a server, and its answers: ``make hostile``.

The same is asserted in each run of the tests (tests/server/test_hostile_media.py).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from support.hostile_media import CONFIG, INNER, LIMITS, OUTER, Tried, try_all  # noqa: E402
from support.http_server import serve_model  # noqa: E402
from support.picture_pages import PicturePages, serving  # noqa: E402


async def try_model(outer: PicturePages, inner: PicturePages) -> list[Tried]:
    """Try all against a tiny model."""
    async with serve_model("llava", "EPD", CONFIG, limits=LIMITS) as served:
        return await try_all(served, outer, inner)


def report(tries: Sequence[Tried]) -> int:
    """Print a table of what was tried. Returns 1 if any was answered."""
    print("| tried | sent | status | code | s |\n|---|---|---:|---|---:|")
    for each in tries:
        print(f"| {each.what} | `{each.sent}` | {each.status} | {each.code} | {each.seconds:.2f} |")
    refused = [each for each in tries if each.status >= 400]
    print(f"\n{len(refused)} of {len(tries)} were refused.")
    return int(len(refused) < len(tries))


def main() -> int:
    """Try all, and print the table."""
    with serving(PicturePages(OUTER)) as outer, serving(PicturePages(INNER)) as inner:
        code = report(asyncio.run(try_model(outer, inner)))
        print(f"Hosts inside were asked {len(inner.asked)} times.")
    return code or int(bool(inner.asked))


if __name__ == "__main__":
    raise SystemExit(main())
