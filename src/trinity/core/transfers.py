"""Overlap of transfers with compute: the user's policy, and group sizes from measured costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from trinity.errors.arguments import Positive, check_arguments

PrecopyMode = Literal["auto", "on", "off"]
KvMode = Literal["auto", "off", "layer", "grouped"]
UNKNOWN_GROUPS = 4  # of layers, for a step whose costs nobody has measured yet
WORTH_S = 5e-3  # of a prompt's transfer: a step that streams takes some 1 ms more for messages and sums
LEAST_PULLS = 8  # measured before "auto" goes by them
LEAST_FIXED_S = 1e-4  # a message and a hop between threads, whatever the line through noisy pulls says
MEMORY = 0.9  # share of what was measured before that stays with each new measurement
FEED_FORWARD = 2 / 3  # of a layer's time comes behind its attention, as in a Llama's matrices
SUMMED = ("bytes", "seconds", "setup_s", "pieces", "digest_s")


@check_arguments
@dataclass(frozen=True)
class TransferPolicy:
    """Rules for when blocks start to move.

    - ``prefetch`` (True): move image features as each item's encoding ends, into blocks that the target reserves ahead
      of prefill (EPD-Serve 3.2). Without it a request's features are offered once all are ready, and pulled when
      nothing is ahead of it at the prefill instance.
    - ``early`` (True): announce features when their encoding is *scheduled*, so that the target reserves while the
      encoder runs (two-stage allocation, vLLM encoder separation).
    - ``store`` (True): pull the features of an image that another instance has cached from there, in place of encoding
      it again (EPD-Serve 3.2, the multimodal store).
    - ``kv`` ("auto"): "off" moves a prompt's KV when its prefill has ended; "layer" moves each layer and each finished
      chunk while prefill goes on; "grouped" moves groups of layers, as many as ``group_layers`` finds best (EPD-Serve
      3.3); "auto" is "grouped" for each prompt whose transfer would take 5 ms, by pulls measured so far, else "off".
    - ``move_s`` (seconds, 5): a decode that moves (``Stream.move``), and whose KV is not at its target by then, goes on
      where it is.
    - ``precopy`` ("off"): with "on" a decode that moves goes on until its full KV blocks are in its target's prefix
      cache, so that it pauses for the rest alone; "auto" is "on" where their pull would take 10 ms, by pulls so far.
    - ``hand_over`` (False): a request that waits to be encoded or prefilled goes to an instance of the same stage that
      has nothing to do (EPDServe 3.2, global queues); features and KV that wait for room to one that has some.
    - ``lease_s`` (seconds, 30): time for which blocks on their way stay leased to a silent peer before they are taken
      back and the request fails. Instances send heartbeats at least four times in it.

    Raises ``ConfigError``.
    """

    prefetch: bool = True
    early: bool = True
    kv: KvMode = "auto"
    store: bool = True
    move_s: Positive = 5.0
    precopy: PrecopyMode = "off"
    hand_over: bool = False
    lease_s: Positive = 30.0


class PullCost(NamedTuple):
    """Cost of a pull: ``fixed`` seconds, and ``cell`` seconds for each layer of each block."""

    fixed: float
    cell: float


class PullTimes:
    """Measured pulls as a line: seconds = fixed + cells * cell, by least squares in which older pulls fade."""

    def __init__(self) -> None:
        self._count = self._cells = self._seconds = self._squares = self._products = 0.0
        self.pulls = 0  # so far

    def add(self, cells: int, seconds: float) -> None:
        self.pulls += 1
        self._count = self._count * MEMORY + 1
        self._cells = self._cells * MEMORY + cells
        self._seconds = self._seconds * MEMORY + seconds
        self._squares = self._squares * MEMORY + cells * cells
        self._products = self._products * MEMORY + cells * seconds

    def cost(self) -> PullCost | None:
        """The line; all of it proportional to size where the pulls so far were of one size. None before the first."""
        if not self._cells:
            return None
        spread = self._count * self._squares - self._cells**2
        if spread > 1e-6 * self._cells**2:
            cell = (self._count * self._products - self._cells * self._seconds) / spread
            fixed = (self._seconds - cell * self._cells) / self._count
            if cell >= 0 and fixed >= 0:
                return PullCost(fixed, cell)
        return PullCost(0.0, self._seconds / self._cells)


class TokenRate:
    """Measured seconds per token, with older measurements fading."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = self._tokens * MEMORY + tokens
        self._seconds = self._seconds * MEMORY + seconds

    def seconds(self, tokens: int) -> float:
        """Predict the seconds of ``tokens`` tokens; 0 where nothing was measured."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


def is_worth_streaming(seconds: float) -> bool:
    """Tell if KV should move while its prefill runs, whose transfer in one piece takes so long (``kv="auto"``).

    What is gained is nearly all of that, in the gap between the first token and the second. What it costs is a sum of
    each layer's keys and values, a few messages, and a step that is not launched behind another.
    """
    return seconds >= WORTH_S


def group_layers(layers: int, compute: float, fixed: float, move: float, rest: float = 0.0) -> int:
    """Layers to a group such that least of the transfer is left when prefill ends (EPD-Serve 3.3, "grouped packaging").

    ``compute``: seconds that one layer of the step takes; ``fixed``: seconds that every pull takes whatever its size;
    ``move``: seconds to move one layer of the step's blocks; ``rest``: seconds of the step that are left when the last
    layer's keys and values are written (its feed-forward part, the head, sampling). Groups of g layers are ready at g,
    2g, ... times ``compute``, less ``rest``, and move one after the other, each in fixed + layers * move. What is
    exposed is the end of the last one minus the end of prefill, if that is later:

        end(k) = max(end(k - 1), ready(k)) + fixed + layers(k) * move
        exposed(g) = max(0, end(last) - layers * compute)

    Where a group moves faster than the next is computed (fixed + g * move <= g * compute) the last group alone can be
    exposed, so that the smallest g that keeps up is best; where it does not, groups queue up and each one less saves
    ``fixed``. Of groups as good the largest is taken: it needs fewest messages.
    """
    best, least = layers, exposed_tail(layers, layers, compute, fixed, move, rest)
    for group in range(layers - 1, 0, -1):
        tail = exposed_tail(group, layers, compute, fixed, move, rest)
        if tail < least * (1 - 1e-9):
            best, least = group, tail
    return best


def exposed_tail(group: int, layers: int, compute: float, fixed: float, move: float, rest: float = 0.0) -> float:
    """Seconds from the end of prefill to the end of the last pull, with groups of ``group`` layers."""
    end, ready = 0.0, 0
    while ready < layers:
        size = min(group, layers - ready)
        ready += size
        end = max(end, ready * compute - rest) + fixed + size * move
    return max(0.0, end - layers * compute)


def should_cut(blocks: int, tail: int, rows: int) -> bool:
    """Tell if a pull leaves out the empty rows of its last block, which costs a second read.

    It does where whole blocks would be more than 1.1 times the bytes of the filled rows. ``tail``: rows in the last of
    ``blocks``, 0 if it is full; ``rows``: of a block.
    """
    return tail > 0 and 10 * blocks * rows > 11 * ((blocks - 1) * rows + tail)


def rows_moved(blocks: int, tail: int, rows: int) -> int:
    """Count the rows that a pull of ``blocks`` moves, by ``should_cut``."""
    return (blocks - 1) * rows + tail if should_cut(blocks, tail, rows) else blocks * rows


def merge_records(total: dict[str, Any], pull: Mapping[str, Any]) -> dict[str, Any]:
    """Add the record of a pull to that of its transfer: sums bytes and seconds, counts ``pulls``."""
    sums = {name: total[name] + pull[name] for name in SUMMED if name in total and name in pull}
    record = {**total, **pull, **sums, "pulls": total.get("pulls", 1) + 1}
    return {**record, "gb_s": gigabytes_a_second(record)} if "gb_s" in record else record


def gigabytes_a_second(record: Mapping[str, Any]) -> float:
    """Gigabytes per second on the wire, without set-up."""
    return record["bytes"] / record["seconds"] / 1e9 if record["seconds"] > 0 else 0.0


def overlap_ratio(exposed: float, busy: float) -> float:
    """1 - exposed / transfer time (EPD-Serve table 4): the share of a transfer that ran while prefill did."""
    return max(0.0, 1.0 - exposed / busy) if busy > 0 else 1.0
