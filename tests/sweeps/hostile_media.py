"""Prints what hostile media were tried against a server, and its answers: ``make hostile``.

    python tests/sweeps/hostile_media.py [--attacks-only] [--patience 300] [--only NAME ...]

The same is asserted in each run of the tests (tests/server/test_hostile_media.py). Then ``trinity serve`` is sent each
attack of tests/support/attacks.py by itself: what its sender and another client saw, and what the server spent. With
another checkout's ``src`` as ``PYTHONPATH`` and ``--attacks-only``, the table is of that code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from support.attacks import list_attacks  # noqa: E402
from support.checkpoint_files import checkpoint  # noqa: E402
from support.hostile_media import CONFIG, INNER, LIMITS, OUTER, Tried, try_all  # noqa: E402
from support.http_server import serve_model  # noqa: E402
from support.picture_pages import PicturePages, serving  # noqa: E402
from support.serve_command import Answer, ServeCommand, ask, chat  # noqa: E402

LOOK_S = 0.2  # between two looks at the server's memory


class Spent(NamedTuple):
    """An attack of so many bytes, its answer, and what the server spent: CPU-seconds, and private bytes.

    ``other_s``: longest wait of another client's text request meanwhile.
    """

    what: str
    sent: int
    status: int
    code: str
    seconds: float
    cpu_s: float
    before: int
    peak: int
    after: int
    other_s: float


async def attack_once(served: ServeCommand, what: str, body: bytes, patience_s: float) -> Spent:
    """Send one attack, and a text request of another client again and again until it is answered."""
    cpu_s, before = served.cpu_s(), sum(served.memory().values())
    peak, other_s = before, 0.0
    attack = asyncio.create_task(ask_patiently(served, body, "127.0.1.1", patience_s))
    while not attack.done():
        other = await ask_patiently(served, chat("hello", max_tokens=1), "127.0.2.1", patience_s)
        assert other.status in (0, 200), other
        peak, other_s = max(peak, sum(served.memory().values())), max(other_s, other.seconds)
        await asyncio.wait([attack], timeout=LOOK_S)
    answer = attack.result()
    code = json.loads(answer.body)["error"]["code"] if answer.status >= 400 else "" if answer.status else "no answer"
    spent, after = served.cpu_s() - cpu_s, sum(served.memory().values())
    return Spent(what, len(body), answer.status, code, answer.seconds, spent, before, peak, after, other_s)


async def ask_patiently(served: ServeCommand, body: bytes, source: str, patience_s: float) -> Answer:
    """Ask, and return an answer of status 0 once patience is at its end."""
    try:
        return await ask(served.port, body, source=source, timeout_s=patience_s)
    except TimeoutError:
        return Answer(0, b"", patience_s)


async def try_attacks(log: Path, bodies: Mapping[str, bytes], patience_s: float) -> list[Spent]:
    """Try attacks against ``trinity serve`` over a tiny model, one after another; one that hangs gets a new server."""
    found, left = list[Spent](), list(bodies.items())
    while left:
        with ServeCommand(checkpoint("llava"), log=log) as served:
            await served.until_ready()
            await ask(served.port, chat("hello", max_tokens=1))
            while left:
                found.append(await attack_once(served, *left.pop(0), patience_s))
                print(f"tried: {found[-1].what}", file=sys.stderr)
                if not found[-1].status or found[-1].other_s >= patience_s:
                    served.process.kill()
                    break
    return found


def report_spent(found: Sequence[Spent]) -> None:
    """Print a table of what each attack cost."""
    print("\n| attack | sent | status | code | s | CPU-s | private before | peak | after | another client's s |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for each in found:
        sizes = " | ".join(f"{size / (1 << 20):.0f} MiB" for size in (each.before, each.peak, each.after))
        answer = f"{each.status} | {each.code} | {each.seconds:.2f} | {each.cpu_s:.2f}"
        print(f"| {each.what} | {each.sent / 1024:.0f} KiB | {answer} | {sizes} | {each.other_s:.2f} |")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Try all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--attacks-only", action="store_true", help="leave out what the tests assert")
    parser.add_argument("--patience", type=float, default=300.0, help="of a client, in seconds")
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks; all")
    asked = parser.parse_args(argv)
    code = 0
    if not asked.attacks_only:
        with serving(PicturePages(OUTER)) as outer, serving(PicturePages(INNER)) as inner:
            code = report(asyncio.run(try_model(outer, inner)))
            print(f"Hosts inside were asked {len(inner.asked)} times.")
            code = code or int(bool(inner.asked))
    bodies = {what: body for what, body in list_attacks().items() if not asked.only or what in asked.only}
    with tempfile.TemporaryDirectory() as folder:
        report_spent(asyncio.run(try_attacks(Path(folder) / "log", bodies, asked.patience)))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
