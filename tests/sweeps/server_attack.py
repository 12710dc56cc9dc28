"""An endless attack on ``trinity serve`` by 16 clients, and what the requests of other clients take meanwhile.

    python tests/sweeps/server_attack.py [--seconds 120] [--rounds 1] [-- further arguments of trinity serve]

The attackers reconnect for ever, each from a loopback address of its own, in a process of the lowest priority. They
send what is dearest among all that the server's bounds still let through, and what it refuses: pictures of many scans,
of text, of high compression, in containers and animations, several in a request, sounds, clips, templates, grammars and
bodies. The clients of the text requests, and one of small pictures, have addresses of their own, too. Three spans are
measured in one run: before, during and after the attack. It fails where texts take at p95 more than three times their
time before, where memory is more than 1 GiB above, or where texts and pictures are not as before 5 s after its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.attacks import list_attacks
from support.checkpoint_files import checkpoint
from support.serve_command import ServeCommand, ask, chat

ATTACKERS, VICTIMS = 16, 2
ATTACK_S = 120.0  # s of one attacker's patience with a request
AS_BEFORE_S = 5.0
TIMES = 3.0  # what texts may take, at p95, in units of what they take before
MOST_MEMORY = 1 << 30


# ---------------------------------------------------------------- the attackers' process


async def attack_on(port: int, number: int, end: float, bodies: dict[str, bytes], seen: Counter[str]) -> None:
    """Send one attack after another until the end, each over a connection of its own."""
    draw = random.Random(number)
    names = sorted(bodies)
    while time.monotonic() < end:
        name = draw.choice(names)
        try:
            patience = min(ATTACK_S, max(0.1, end - time.monotonic()), draw.choice((2.0, ATTACK_S)))
            answer = await ask(port, bodies[name], source=f"127.0.1.{number + 1}", timeout_s=patience)
            code = answer.json()["error"]["code"] if answer.status >= 400 and answer.body else "served"
            seen[f"{name}: {answer.status} {code}"] += 1
        except (TimeoutError, OSError) as error:
            seen[f"{name}: {type(error).__name__}"] += 1


async def attack(port: int, seconds: float, chosen: Sequence[str]) -> Counter[str]:
    bodies = {name: body for name, body in list_attacks().items() if not chosen or name in chosen}
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    end, seen = time.monotonic() + seconds, Counter[str]()
    await asyncio.gather(*[attack_on(port, number, end, bodies, seen) for number in range(ATTACKERS)])
    return seen


# ---------------------------------------------------------------- the others


class Victims:
    """Clients that ask small things one after another; ``times`` are the seconds of each, by kind and span."""

    def __init__(self, server: ServeCommand) -> None:
        self._server, self.span, self.ending = server, "", False
        self.times: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.failed = Counter[str]()
        self.memory: dict[str, int] = defaultdict(int)
        self.held: dict[str, str] = {}  # by which processes, at the most of a span
        self.tasks = [asyncio.ensure_future(self._ask_on("text", number)) for number in range(VICTIMS)]
        self.tasks += [asyncio.ensure_future(self._ask_on("picture", VICTIMS)), asyncio.ensure_future(self._watch())]

    async def _ask_on(self, kind: str, number: int) -> None:
        draw = random.Random(number)
        while not self.ending:
            urls = (_small_picture(draw),) if kind == "picture" else ()
            body = chat(f"Tell {draw.randrange(10**6)} things.", urls, max_tokens=4)
            span, began = self.span, time.monotonic()
            try:
                answer = await ask(self._server.port, body, source=f"127.0.2.{number + 1}", timeout_s=300)
                if answer.status != 200:
                    self.failed[f"{kind} {span} {answer.status} {answer.body[:120]!r}"] += 1
            except (TimeoutError, OSError) as error:
                self.failed[f"{kind} {span} {type(error).__name__}"] += 1
            self.times[kind, span].append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        while not self.ending:
            found = await asyncio.to_thread(self._server.memory)  # 0.1 s of walks that the clients would wait for
            if (total := sum(found.values())) > self.memory[self.span]:
                self.memory[self.span] = total
                most = sorted(found, key=lambda name: -found[name])[:6]
                self.held[self.span] = ", ".join(f"{each} {found[each] / 2**20:.0f}" for each in most)
            await asyncio.sleep(0.5)

    def quantile(self, kind: str, span: str, share: float) -> float:
        found = sorted(self.times[kind, span])
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("inf")


def _small_picture(draw: random.Random) -> str:
    import base64
    import io

    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (60, 40), (draw.randrange(256), draw.randrange(256), 0)).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def start_attackers(port: int, seconds: float, chosen: Sequence[str]) -> subprocess.Popen[str]:
    """Start the attackers' process, which makes its files and then waits for a line."""
    command = [sys.executable, __file__, "--attack", str(port), "--seconds", str(seconds), "--only", *chosen]
    made = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19) and None
    )
    assert made.stdout is not None
    assert made.stdout.readline() == "ready\n"
    return made


async def run(asked: argparse.Namespace) -> int:
    options = ("--placement", asked.placement, "--hosting", "process", "--dtype", "float32", *asked.serve)
    problems: list[str] = []
    with ServeCommand(checkpoint("llava"), *options, log=Path(asked.log)) as server:
        await server.until_ready()
        attackers = await asyncio.to_thread(start_attackers, server.port, asked.seconds, asked.only)
        assert attackers.stdin is not None
        assert attackers.stdout is not None
        victims = Victims(server)
        victims.span = "warm"
        await asyncio.sleep(10)
        victims.span = "before"
        await asyncio.sleep(max(20.0, asked.seconds / 3))
        cpu = server.cpu_s()
        victims.span = "during"
        attackers.stdin.write("go\n")
        attackers.stdin.flush()
        said = await asyncio.to_thread(attackers.stdout.readline)
        attackers.wait()
        spent = server.cpu_s() - cpu
        victims.span = "ended"
        await asyncio.sleep(AS_BEFORE_S)
        victims.span = "after"
        await asyncio.sleep(max(20.0, asked.seconds / 3))
        victims.ending = True
        await asyncio.gather(*victims.tasks)
        ready = await ask(server.port, path="/ready")
    problems += report(victims, json.loads(said), spent)
    problems += [] if ready.status == 200 else [f"/ready answers {ready.status}"]
    print("\n".join(problems) or "others were served as they should be")
    return 1 if problems else 0


def report(victims: Victims, seen: dict[str, int], cpu_s: float) -> list[str]:
    """Print what attackers and others saw. Returns what is beyond a bound."""
    for each, count in sorted(seen.items()):
        print(f"attackers: {each} x {count}")
    print(f"CPU of the server during the attack: {cpu_s:.1f} s")
    for span in ("before", "during", "ended", "after"):
        figures = [
            f"{kind} {len(victims.times[kind, span])} requests, p50 {victims.quantile(kind, span, 0.5):.3f} s, "
            f"p95 {victims.quantile(kind, span, 0.95):.3f} s, longest {victims.quantile(kind, span, 1.0):.3f} s"
            for kind in ("text", "picture")
        ]
        print(f"{span:7} {'; '.join(figures)}; private memory at most {victims.memory[span] / 2**20:.0f} MiB")
        print(f"        of it in MiB: {victims.held.get(span, 'not looked at')}")
    problems = [f"another client's {each} x {count}" for each, count in victims.failed.items()]
    ratio = victims.quantile("text", "during", 0.95) / victims.quantile("text", "before", 0.95)
    print(f"texts at p95 during the attack: {ratio:.2f} times what they take before")
    problems += [f"texts take {ratio:.1f} times as long"] if ratio > TIMES else []
    above = victims.memory["during"] - victims.memory["before"]
    problems += [f"memory is {above / 2**20:.0f} MiB above"] if above > MOST_MEMORY else []
    for kind in ("text", "picture"):
        later = statistics.median(victims.times[kind, "after"]) / statistics.median(victims.times[kind, "before"])
        problems += [f"a {kind} takes {later:.1f} times as long after the attack"] if later > TIMES else []
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the attack")
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks; all")
    parser.add_argument("--placement", default="1E1P1D")
    parser.add_argument("--log", default=str(Path(tempfile.gettempdir()) / "server_attack.log"))
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs="*", default=[], help="further arguments of trinity serve")
    asked = parser.parse_args(argv)
    if asked.attack:
        with suppress(KeyboardInterrupt):
            print(json.dumps(asyncio.run(attack(asked.attack, asked.seconds, asked.only))), flush=True)
        return 0
    return asyncio.run(run(asked))


if __name__ == "__main__":
    sys.exit(main())
