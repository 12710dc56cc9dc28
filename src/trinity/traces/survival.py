"""Survival of outputs: how long one becomes, told from those that have ended and those that still run.

The outputs that have ended first are the short ones, so their mean is none of the traffic's. An output that still runs
says that it is longer than what it has: a censored observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from trinity.traces.trace import TraceRow

RUNNING = "running"  # finish reason of a row whose request is still served: ``output_length`` is what it has so far
LEAST_AT_RISK = 10  # recent outputs that must have reached a length for their own share of ends there to count
Seen = tuple[int, bool]  # tokens of an output, and whether it has ended there by itself


def observe(row: TraceRow) -> Seen:
    """Tell what a row says of output lengths: its tokens, and whether it ended there by itself.

    One that runs, was cut short, or was stopped by its own ``max_tokens`` would have gone on.
    """
    if row.is_cut_short:
        return row.output_length, False
    if row.finish_reason == "length" and row.max_tokens and row.output_length >= row.max_tokens:
        return row.max_tokens - 1, False
    return row.output_length, True


class OutputSurvival:
    """Chance that an output is longer than so many tokens, by what was seen of outputs.

    Kaplan and Meier's estimate (Nonparametric estimation from incomplete observations, JASA 53, 1958): the product over
    lengths of 1 - ends / outputs that had reached that length. One that has not ended counts as far as it has come.
    Beyond the longest the chance falls exponentially, as fast as it did on the mean until there (Brown, Hollander and
    Korwar, 1974), and at least so fast that it is not expected to double.

    recent: outputs whose lengths are asked for, (tokens, whether it has ended) of each.
    older (()): more outputs, which tell of lengths that fewer than ``LEAST_AT_RISK`` recent ones have reached so far.
    """

    def __init__(self, recent: Iterable[Seen], older: Iterable[Seen] = ()) -> None:
        new, old = list(recent), list(older)
        size = 1 + max((tokens for tokens, _ in (*new, *old)), default=0)
        ends, risk = _count(new, size)
        every, at_risk = (one + other for one, other in zip((ends, risk), _count(old, size), strict=True))
        share = np.where(risk >= LEAST_AT_RISK, ends / np.maximum(risk, 1), every / np.maximum(at_risk, 1))
        self.knows_ends = bool(every.any())
        self._chance = np.cumprod(1 - share)
        self._sums = np.concatenate([[0.0], np.cumsum(self._chance)])
        last = float(self._chance[-1])
        longest = max(1, size - 1)
        self._keep = math.exp(-max(1.0, -math.log(last)) / longest) if last > 0 else 0.0

    def chance(self, tokens: int) -> float:
        """Chance that an output is longer than ``tokens``."""
        beyond = tokens - len(self._chance) + 1
        return float(self._chance[min(tokens, len(self._chance) - 1)]) * (self._keep**beyond if beyond > 0 else 1.0)

    def expected(self, tokens: int, most: int | None = None) -> float:
        """Tokens expected of an output that has ``tokens`` and goes on, of at most ``most`` (None: no limit).

        Where no output has ended, that is ``most``, or what it has.
        """
        if not self.knows_ends:
            return float(max(tokens, most or 0))
        limit = math.inf if not most else max(most, tokens)
        here, known = self.chance(tokens), len(self._chance)
        if here <= 0:
            return min(limit, tokens + 1.0)
        upto = int(min(limit, known))
        left = float(self._sums[upto] - self._sums[tokens]) / here if tokens < upto else 0.0
        first = max(tokens, known)  # the rest is a geometric series
        if limit > first and self._keep:
            terms = 1 - self._keep ** (limit - first)
            left += self.chance(first) / here * terms / (1 - self._keep)
        return tokens + left

    def fill(self, row: TraceRow) -> int:
        """Output in tokens expected of a row that runs or was cut short; its own of any other."""
        if not row.is_cut_short:
            return row.output_length
        return max(1, row.output_length, round(self.expected(row.output_length, row.max_tokens)))


def _count(seen: list[Seen], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count by length [size] the outputs that ended there, and those that had come so far."""
    ends = np.bincount([tokens for tokens, ended in seen if ended] or [0], minlength=size)
    alive = np.bincount([tokens for tokens, _ in seen] or [0], minlength=size)
    if not any(ended for _, ended in seen):
        ends[0] = 0
    if not seen:
        alive[0] = 0
    return ends, alive[::-1].cumsum()[::-1]
