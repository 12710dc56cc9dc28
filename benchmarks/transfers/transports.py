"""Speed of blocks by every available transport, each beside one copy of the same bytes in one piece."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import MAX_FOREIGN_SHARE, ROOT, ForeignLoad, Setting, disturbed
from trinity.errors import TransportUnavailable
from trinity.transport import make_transport

PROBE = Path(__file__).with_name("probe.py")
COUNTS = (1, 16, 256, 4096)
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (16 * KIB, 128 * KIB, MIB, 8 * MIB)
MOST_BYTES = 512 * MIB  # of one read; every pool is there twice, and once more in one piece
RUN_BYTES = MIB  # the aims are for pieces of this size and more
MUCH_BYTES = 16 * MIB  # where bandwidth decides, and not the time that it takes to ask
END_S = 60.0
PATIENCE = 3  # rounds, where others disturb


@dataclass(frozen=True)
class Medium:
    """A transport under one choice of lanes. ``local``: its limit is a non-temporal copy, and it should reach 90 %."""

    name: str
    scheme: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        return self.scheme in ("inproc", "shm")

    @property
    def aim(self) -> float:
        return 0.9 if self.local else 0.8


MEDIA = (
    Medium("inproc", "inproc"),
    Medium("shm", "shm"),
    Medium("nixl, lanes of UCX's choice", "nixl"),
    Medium("nixl over TCP", "nixl", {"UCX_TLS": "tcp"}),
    Medium("nixl-push over TCP", "nixl-push", {"UCX_TLS": "tcp"}),
    Medium("ucx over TCP", "ucx", {"UCX_TLS": "tcp"}),
)


@dataclass
class Case:
    """Seconds of every read of ``count`` blocks, of copies of the same bytes in one piece, and of their digests."""

    block_bytes: int
    count: int
    bytes: int
    reads: list[float]
    copies: list[float]
    digests: list[float]

    @property
    def share(self) -> float:
        """Of the limit."""
        return median(self.copies) / median(self.reads)

    def rate(self, seconds: Sequence[float]) -> float:
        """GB/s at the median."""
        return self.bytes / median(seconds) / 1e9

    def row(self) -> list[str]:
        late = sorted(self.reads)[min(len(self.reads) - 1, round(0.95 * (len(self.reads) - 1)))]
        times = [f"{median(self.reads) * 1e6:.0f}", f"{late * 1e6:.0f}"]
        rates = [f"{self.rate(each):.2f}" for each in (self.reads, self.copies, self.digests)]
        return [size(self.block_bytes), str(self.count), *times, *rates[:2], f"{self.share:.0%}", rates[2]]


HEADER = ("block", "blocks", "p50 µs", "p95 µs", "GB/s", "in one piece GB/s", "of that", "digest GB/s")


def size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


@contextmanager
def process(role: str, medium: Medium) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **medium.environment}
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROBE), role, medium.scheme]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as started:
        try:
            yield started
            started.communicate(timeout=END_S)  # the end of its stdin tells it to leave
        finally:
            started.kill()


def ask(started: subprocess.Popen[str], order: dict[str, Any], what: str) -> Any:
    """Send a line, take one back. Raises ``RuntimeError`` where the process ends without."""
    assert started.stdin is not None
    assert started.stdout is not None
    started.stdin.write(json.dumps(order) + "\n")
    started.stdin.flush()
    line = started.stdout.readline()
    if not line:
        raise RuntimeError(f"{what} ended without an answer; see above")
    return json.loads(line)


def measure(medium: Medium, block_bytes: int, counts: Sequence[int], most: int, seconds: float) -> list[Case]:
    """One block size over one medium: a lender and, in a process of its own, the consumer that is measured."""
    fitting = [count for count in counts if count * block_bytes <= most]
    blocks = max(fitting)
    pools = [[blocks, block_bytes]] + ([] if medium.local else [[1, blocks * block_bytes]])
    order: dict[str, Any] = {"pools": pools, "counts": fitting, "seconds": seconds, "descriptors": []}
    with ExitStack() as stack:
        if medium.scheme != "inproc":
            lender = stack.enter_context(process("lend", medium))
            order["descriptors"] = ask(lender, order, f"the lender of {medium.name}")
        reader = stack.enter_context(process("read", medium))
        found = ask(reader, order, f"the consumer of {medium.name}")
    return [Case(block_bytes=block_bytes, **each) for each in found]


def available(medium: Medium) -> str:
    """Say why it cannot be measured here; "" where it can."""
    try:
        make_transport(medium.scheme)
    except TransportUnavailable as error:
        return str(error)
    return ""


def run(setting: Setting) -> Result:
    """Every medium with every block size and count that fits."""
    media = MEDIA[:2] if setting.quick else MEDIA
    blocks, counts, most = ((MIB,), (1, 16), 16 * MIB) if setting.quick else (BLOCK_BYTES, COUNTS, MOST_BYTES)
    missing = {medium.name: why for medium in media if (why := available(medium))}
    found: dict[str, list[Case]] = {}
    noisy: list[str] = []
    for medium in media:
        for block_bytes in blocks if medium.name not in missing else ():
            cases, quiet = undisturbed(setting, medium, block_bytes, counts, most)
            found.setdefault(medium.name, []).extend(cases)
            if not quiet:
                noisy.append(f"{medium.name}, {size(block_bytes)}")
    return result([medium for medium in media if medium.name in found], found, missing, noisy)


def undisturbed(
    setting: Setting, medium: Medium, block_bytes: int, counts: Sequence[int], most: int
) -> tuple[list[Case], bool]:
    """A round in which others left the machine alone, or the last of several."""
    for _ in range(1 if setting.quick else PATIENCE):
        setting.settle()
        with ForeignLoad() as load:
            cases = measure(medium, block_bytes, counts, most, 0.02 if setting.quick else 1.0)
        if load.share <= MAX_FOREIGN_SHARE:
            return cases, True
    return cases, False


def result(
    media: Sequence[Medium], found: Mapping[str, list[Case]], missing: Mapping[str, str], noisy: Sequence[str]
) -> Result:
    return Result(
        name="transports",
        title="Transports: blocks between two processes",
        method=(
            "Scattered blocks out of a pool that another process lends (inproc: the same process) into one of the "
            "consumer's, which is measured, control and threads included: `await remote.read(...)`. In one piece: the "
            "same number of bytes, in turn with the reads in the same process; for inproc and shm one pass of csrc "
            "from the lent memory into the target (non-temporal from 1 MiB on), of which the cache has as much as of "
            "the reads' target, for the others one contiguous read by the same transport. digest: of the blocks that "
            "were read, what verification costs each side. At least "
            "5 rounds, a second of them, at most 200."
        ),
        tables=[Table(medium.name, HEADER, [case.row() for case in found[medium.name]]) for medium in media],
        aims=[aim(medium, found[medium.name], least) for medium in media for least in (0, MUCH_BYTES)],
        notes=[f"Not measured: {name}: {why}" for name, why in missing.items()] + disturbed(noisy),
        values={
            medium.name: [
                {**vars(case), "share": case.share, "gb_s": case.rate(case.reads)} for case in found[medium.name]
            ]
            for medium in media
        },
    )


def aim(medium: Medium, cases: Sequence[Case], least: int) -> Aim:
    """The worst of the cases with pieces of ``RUN_BYTES`` and more, and ``least`` bytes in all, beside the limit."""
    counted = [case for case in cases if case.block_bytes >= RUN_BYTES and case.bytes >= least]
    worst = min(counted, key=lambda case: case.share)
    limit = "the non-temporal copy" if medium.local else "one contiguous copy over the same medium"
    reads = f"reads of {size(least)} and more" if least else "every read"
    return Aim(
        what=f"{medium.name}: {reads} in blocks of {size(RUN_BYTES)} and more, of {limit}",
        aim=f"≥ {medium.aim:.0%}",
        measured=f"{worst.share:.0%} ({worst.count} of {size(worst.block_bytes)})",
        met=worst.share >= medium.aim,
    )
