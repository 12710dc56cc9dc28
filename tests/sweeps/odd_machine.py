"""Serves on a machine that misbehaves, and compares every answer with transformers' generate().

    python tests/sweeps/odd_machine.py [--only full,clock,oom,slow,salts,front] [--readers 2000] [--deaths 6]

``full``: /dev/shm, TMPDIR, the cache's and the log's disk without a byte or an inode left, and parts killed meanwhile.
``clock``: the wall clock jumps by years in the middle of streams. ``oom``: the kernel kills an instance at the limit of
its control group. ``slow``: thousands of streams that nobody reads. ``salts``: times to the first token with a prefix
that the same tenant, another one or nobody has cached. ``front``: the server itself is killed; nothing may be left.
It needs root (mounts, control groups) and a C compiler (the clock).
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.checkpoint_files import checkpoint
from support.memory_groups import count_kills, limit, memory_group
from support.serve_command import CHAT, Answer, ServeCommand, ask, chat
from sweeps.server_kills import Question, make_questions, parts

OPTIONS = ("--placement", "1E1P1D", "--hosting", "process", "--dtype", "float32", "--max-waiting", "4096")
END_S = 300.0  # s that a request may take on a busy machine, recoveries included
PARTS = ("E0", "P0", "D0", "launch")
YEARS = 10 * 365 * 86400  # s
# A small /dev/shm, and a small disk at $0 that has TMPDIR, trinity's cache and the server's log.
SMALL = """
mount -t tmpfs -o size=4m,nr_inodes=200 none /dev/shm && mount -t tmpfs -o size=16m,nr_inodes=400 none "$0" &&
mkdir "$0/tmp" "$0/cache" && exec "$@" 2>> "$0/log"
"""
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile int64_t *ahead(void) {
    static volatile int64_t *found;
    if (!found) {
        int file = open(getenv("ODD_CLOCK"), O_RDONLY | O_CLOEXEC);
        found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return found;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && clock == CLOCK_REALTIME) at->tv_sec += *ahead();
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """A wall clock for a server and its children, ``jump`` seconds ahead; the monotonic one is the system's."""

    def __init__(self, folder: Path) -> None:
        source, library, file = folder / "clock.c", folder / "clock.so", folder / "ahead"
        source.write_text(CLOCK)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._ahead = mmap.mmap(opened.fileno(), 8)
        self.environ = {"LD_PRELOAD": str(library), "ODD_CLOCK": str(file)}

    def jump(self, seconds: int) -> None:
        self._ahead[:] = struct.pack("q", seconds)


class Judge:
    """Asks the questions, and counts answers by their end; ``wrong`` has those that differ from generate()'s."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self.ends: Counter[str] = Counter()
        self.tokens, self.wrong = 0, list[str]()

    async def ask_all(self, port: int, times: int = 1, source: str = "127.0.0.1") -> float:
        """Ask every question so many times, six at once; returns the longest wait in seconds."""
        turn = asyncio.Semaphore(6)

        async def one(question: Question) -> float:
            async with turn:
                answer = await ask(port, question.body, timeout_s=END_S, source=source)
            self.judge(question, answer)
            return answer.seconds

        return max(await asyncio.gather(*map(one, [*self._questions] * times)))

    def judge(self, question: Question, answer: Answer) -> None:
        if answer.status != 200:
            self.ends[f"{answer.status} {answer.json()['error']['code'] if answer.body else ''}"] += 1
            return
        ids = answer.json()["choices"][0]["token_ids"]
        self.ends["200"] += 1
        self.tokens += len(ids)
        if ids != question.ids:
            self.wrong.append(f"{ids} and not {question.ids}")

    def expect(self, right: bool, fault: str) -> None:
        """Note a fault of another kind."""
        if not right:
            self.wrong.append(fault)

    def report(self) -> str:
        self.expect(set(self.ends) <= {"200"}, f"not all were answered: {dict(self.ends)}")
        found = f"{dict(self.ends)}, {self.tokens} tokens compared, {len(self.wrong)} wrong"
        self.ends, self.tokens = Counter(), 0
        return found


async def until_healed(server: ServeCommand, seconds: float = 240.0) -> float:
    """Wait until every stage is served; returns the seconds that took. Raises ``TimeoutError``."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while True:
            with suppress(OSError, ValueError):
                answer = await ask(server.port, path="/ready", timeout_s=60)
                if answer.status == 200 and not answer.json().get("missing_stages"):
                    return time.monotonic() - began
            await asyncio.sleep(0.2)


def fill(folder: Path) -> tuple[int, int]:
    """Leave not one byte and not one inode on a small disk; returns how many there were."""
    size, inodes = 0, 0
    with suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
        for block in (1 << 16, 1):
            with suppress(OSError):
                while True:
                    size += file.write(bytes(block))
    with suppress(OSError):
        while True:
            (folder / f"empty-{inodes}").touch()
            inodes += 1
    return size, inodes


def empty(folder: Path) -> None:
    for each in [*folder.glob("empty-*"), folder / "filling"]:
        each.unlink(missing_ok=True)


async def try_full(server: ServeCommand, judge: Judge, disk: Path) -> None:
    """Fill, ask, kill each part, ask, make room, ask."""
    root = Path(f"/proc/{server.process.pid}/root")
    folders = [root / "dev/shm", root / str(disk).lstrip("/")]
    print("full: filled (bytes, inodes)", [fill(each) for each in folders], flush=True)
    print(f"full: longest {await judge.ask_all(server.port):.1f} s;", judge.report(), flush=True)
    for part in [*PARTS, *sorted(set(parts(server)) - set(PARTS))]:
        victims = parts(server).get(part)
        if not victims:
            print(f"full: no {part}", flush=True)
            continue
        os.kill(victims[0].pid, signal.SIGKILL)
        longest = await judge.ask_all(server.port)
        print(f"full: {part} killed, longest {longest:.1f} s;", judge.report(), flush=True)
        with suppress(TimeoutError):
            print(f"full: all stages back {await until_healed(server, 60):.1f} s later", flush=True)
            continue
        print("full: a stage stays away; room is made", flush=True)
        for each in folders:
            empty(each)
        print(f"full: all stages back {await until_healed(server):.1f} s later", flush=True)
        for each in folders:
            fill(each)
    for each in folders:
        empty(each)
    await until_healed(server)
    print(f"full: room again, longest {await judge.ask_all(server.port):.1f} s;", judge.report(), flush=True)
    log = folders[1] / "log"
    print("full: the log's end:", log.read_text(errors="replace")[-1500:] if log.exists() else "none", flush=True)


async def try_clock(server: ServeCommand, judge: Judge, clock: Clock) -> None:
    """Jump every half second while all questions are asked."""

    async def jump() -> None:
        for seconds in (YEARS, -YEARS, 3600, -3600, 0, 4 * YEARS, -5 * YEARS) * 1000:
            clock.jump(seconds)
            await asyncio.sleep(0.5)

    before = {each.pid for each in server.tree()}
    jumping = asyncio.create_task(jump())
    longest = await judge.ask_all(server.port, 4)
    ready = await ask(server.port, path="/ready")
    jumping.cancel()
    clock.jump(YEARS)
    await asyncio.sleep(1.0)
    created = (await ask(server.port, chat("Now?", max_tokens=2))).json()["created"] - time.time()
    gone = before - {each.pid for each in server.tree()}
    judge.expect(not gone and ready.status == 200, f"{len(gone)} processes ended, /ready is {ready.status}")
    judge.expect(abs(created - YEARS) < 600, "the clock of the server did not jump")
    print(
        f"clock: longest {longest:.1f} s, /ready {ready.status}, created is {created / YEARS:.2f} of the jump ahead, "
        f"{len(gone)} processes ended;", judge.report(), flush=True,
    )  # fmt: skip
    clock.jump(0)


async def try_oom(server: ServeCommand, judge: Judge) -> None:
    """Put each instance at a limit below what it has, while the questions are asked."""
    for part in ("E0", "P0", "D0"):
        with memory_group() as group:
            assert group is not None, "no control group of memory may be made here"
            pid = parts(server)[part][0].pid
            asking = asyncio.create_task(judge.ask_all(server.port, 4))
            await asyncio.sleep(0.5)
            limit(group, 1 << 16)  # what it has is not counted, what it takes is
            (group / "cgroup.procs").write_text(str(pid))
            longest = await asking
            killed, healed = count_kills(group), await until_healed(server)
            judge.expect(killed == 1, f"the kernel has killed {killed} at the limit of {part}")
            print(
                f"oom: {part} of {pid}, kills by the kernel {killed}, longest {longest:.1f} s, healed {healed:.1f} s;",
                judge.report(), flush=True,
            )  # fmt: skip


def open_slow(port: int, body: bytes, buffer: int = 4096) -> socket.socket:
    """Send a request and read nothing of its answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.bind(("127.0.0.9", 0))
    client.connect(("127.0.0.1", port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


async def try_slow(server: ServeCommand, judge: Judge, readers: int) -> None:
    """Thousands of streams that nobody reads, next to another client's requests."""
    before = sum(server.memory().values())
    body = chat("Say much.", max_tokens=96, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
    clients, began = list[socket.socket](), time.monotonic()
    try:
        for _ in range(readers):
            clients.append(open_slow(server.port, body))
            if len(clients) % 50 == 0:
                await asyncio.sleep(0.01)
        longest, peak = list[float](), 0
        while time.monotonic() - began < max(10, readers / 20):
            longest.append(await judge.ask_all(server.port, source="127.0.0.2"))
            peak = max(peak, sum(server.memory().values()))
            rows = (await ask(server.port, path="/metrics")).body.decode()
            shown = [row for row in rows.splitlines() if row.startswith("trinity_requests_") and "bucket" not in row]
            print(f"slow: {time.monotonic() - began:.0f} s, {peak - before >> 20} MiB more,", shown[:12], flush=True)
        print(f"slow: {readers} readers, longest of others {max(longest):.1f} s;", judge.report(), flush=True)
        ends: Counter[str] = Counter()
        for client in clients:
            client.setblocking(False)
            got = b""
            try:
                while piece := client.recv(1 << 16):
                    got += piece
                ends[got[9:12].decode() + " closed"] += 1
            except BlockingIOError:
                ends[got[9:12].decode() + " open"] += 1
            except ConnectionError:
                ends[got[9:12].decode() + " reset"] += 1
        print("slow: what the readers had:", dict(ends), flush=True)
    finally:
        for client in clients:
            client.close()
    await asyncio.sleep(5)
    print(
        f"slow: 5 s after, {sum(server.memory().values()) - before >> 20} MiB more; "
        f"longest {await judge.ask_all(server.port):.1f} s;", judge.report(), flush=True,
    )  # fmt: skip


async def try_salts(server: ServeCommand, judge: Judge, rounds: int = 30) -> None:
    """Time the first token of prompts that the same tenant, another or nobody has asked before."""
    draw, kinds = random.Random(0), ["same salt", "other salt", "no salt", "nobody"]
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}

    async def timed(text: str, salt: str) -> tuple[float, int]:
        answer = await ask(server.port, chat(text, max_tokens=1, cache_salt=salt or None))
        return answer.seconds * 1e3, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    for number in range(rounds):
        text = f"{number} " + " ".join(draw.choice(["sea", "sky", "hill", "bird"]) for _ in range(350))
        await timed(text, "one")
        await asyncio.sleep(0.02)
        draw.shuffle(kinds)
        for kind in kinds:
            asked = f"{number + rounds} {text}" if kind == "nobody" else text
            salt = {"same salt": "one", "no salt": ""}.get(kind, "two")
            found[kind].append(await timed(asked, salt))
    for kind, rows in found.items():
        times, cached = sorted(row[0] for row in rows), {row[1] for row in rows}
        middle = times[len(times) // 2]
        print(
            f"salts: {kind}: median {middle:.1f} ms, quartiles {times[len(times) // 4]:.1f} to "
            f"{times[3 * len(times) // 4]:.1f}, cached tokens {sorted(cached)[:3]}", flush=True,
        )  # fmt: skip


def leftovers(folder: Path) -> list[str]:
    sockets = [row.split()[-1] for row in Path("/proc/net/unix").read_text().splitlines() if str(folder) in row]
    return sorted(str(each) for each in folder.rglob("*")) + sockets


def running(marker: str) -> list[str]:
    """List what runs with a variable of this value in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
    return found


async def try_front(model: Path, judge: Judge, folder: Path, deaths: int) -> None:
    """Kill the server amid its requests, and look at what is left then and after the next start."""
    draw = random.Random(0)
    shm = {each.name for each in Path("/dev/shm").iterdir()}
    for number in range(deaths):
        temporary = folder / "front"
        temporary.mkdir(exist_ok=True)
        marker = f"ODD_MARK={os.getpid()}-{number}-"
        environ = {"TMPDIR": str(temporary), "ODD_MARK": marker.removeprefix("ODD_MARK=")}
        began = time.monotonic()
        with ServeCommand(model, *OPTIONS, log=folder / "front.log", environ=environ) as server:
            if number % 3:
                await server.until_ready()
                at_start = leftovers(temporary)
                asking = asyncio.create_task(judge.ask_all(server.port))
                if number % 3 == 1:
                    await asking
                    print(f"front {number}: started {time.monotonic() - began:.1f} s,", judge.report(), flush=True)
                    asking = asyncio.create_task(judge.ask_all(server.port, 9))
                await asyncio.sleep(draw.uniform(0.2, 2.0))
                frozen = [each.pid for each in server.tree() if each.name == "trinity:D0"]
                if number % 2:
                    for pid in frozen:
                        os.kill(pid, signal.SIGSTOP)
            else:
                await asyncio.sleep(draw.uniform(0.0, 6.0))
                at_start, asking = leftovers(temporary), asyncio.create_task(asyncio.sleep(0, 0.0))
            had = len(server.tree())
            server.process.kill()
            died = time.monotonic()
            with suppress(Exception):
                await asking
            judge.ends.clear()
            while (left := running(marker)) and time.monotonic() - died < 60:
                await asyncio.sleep(0.05)
            gone = time.monotonic() - died
            judge.expect(not left, f"left running: {left}")
        new = {each.name for each in Path("/dev/shm").iterdir()} - shm
        print(
            f"front {number}: {had} processes, all gone after {gone:.2f} s, left {left}; folders and sockets "
            f"{len(at_start)} before, {len(leftovers(temporary))} after: {leftovers(temporary)[:3]}, /dev/shm {new}",
            flush=True,
        )  # fmt: skip
    with ServeCommand(model, *OPTIONS, log=folder / "front.log", environ=environ) as server:
        await server.until_ready()
        print("front: the next start has", sorted(each.name for each in temporary.iterdir()),
              "in /dev/shm", {each.name for each in Path("/dev/shm").iterdir()} - shm, flush=True)  # fmt: skip
    judge.expect(not leftovers(temporary), f"left behind: {leftovers(temporary)}")
    print("front: after its end", leftovers(temporary), {each.name for each in Path("/dev/shm").iterdir()} - shm)


async def run(asked: argparse.Namespace, folder: Path) -> int:
    model, only = checkpoint("llava"), asked.only.split(",")
    judge = Judge(make_questions(model))
    disk = folder / "disk"
    disk.mkdir()
    clock = Clock(folder)
    environ = {**clock.environ, "TMPDIR": str(disk / "tmp"), "TRINITY_CACHE": str(disk / "cache")}
    around = ("unshare", "-m", "sh", "-c", SMALL, str(disk))
    tries: dict[str, Callable[[ServeCommand], Awaitable[None]]] = {
        "clock": lambda server: try_clock(server, judge, clock),
        "salts": lambda server: try_salts(server, judge),
        "oom": lambda server: try_oom(server, judge),
        "full": lambda server: try_full(server, judge, disk),
        "slow": lambda server: try_slow(server, judge, asked.readers),
    }
    if set(only) & set(tries):
        with ServeCommand(model, *OPTIONS, log=folder / "log", environ=environ, around=around) as server:
            await server.until_ready()
            print(f"undisturbed: longest {await judge.ask_all(server.port):.1f} s;", judge.report(), flush=True)
            for name, attempt in tries.items():
                if name in only:
                    await attempt(server)
    if "front" in only:
        await try_front(model, judge, folder, asked.deaths)
    print("\n".join(judge.wrong[:20]) or "nothing wrong")
    return 1 if judge.wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="clock,salts,oom,full,slow,front")
    parser.add_argument("--readers", type=int, default=2000)
    parser.add_argument("--deaths", type=int, default=6)
    with tempfile.TemporaryDirectory(prefix="odd-") as folder:
        return asyncio.run(run(parser.parse_args(argv), Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
