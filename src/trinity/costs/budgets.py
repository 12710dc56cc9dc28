"""Budgets of Algorithm 1: searched by measuring the running model (TriInfer 4.2), or given by hand; their cache."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import tempfile
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from trinity.errors import ConfigError, TrinityWarning

Table = tuple[tuple[int, float], ...]  # (how many, seconds): both ascending
MOST_ROWS = 512  # decode rows beyond which nothing is tried: throughput saturates before (TriInfer figure 3)
MOST_TOKENS = 8192
MOST_IMAGES = 64
_CONFIRMATIONS = 3  # fresh measurements of which the median decides
_TRIES = 2  # measurements of a probe that is too slow: noise only ever adds time


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, interpolated from measurements of each kind of row alone.

    Each table has (how many, seconds), ascending in both; ``StepCost.measured`` makes them so. A kind without a table
    costs nothing. Raises ``ConfigError`` for a table out of order.
    """

    decodes: Table = ()
    prefill: Table = ()
    media: Table = ()

    def __post_init__(self) -> None:
        for name, table in (("decodes", self.decodes), ("prefill", self.prefill), ("media", self.media)):
            pairs = zip(((0, 0.0), *table), table, strict=False)
            if not all(m < n and s <= t < math.inf for (m, s), (n, t) in pairs):
                raise ConfigError(
                    f"cost table {name!r} must ascend in count (from 1) and seconds; use StepCost.measured"
                )

    @classmethod
    def measured(
        cls,
        decodes: Mapping[int, float] | None = None,
        prefill: Mapping[int, float] | None = None,
        media: Mapping[int, float] | None = None,
    ) -> StepCost:
        """From seconds by count. Times that fall as the count grows are noise: the lower of the two holds."""
        return cls(decodes=_ascending(decodes), prefill=_ascending(prefill), media=_ascending(media))

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Predicted time of one step with these rows; never falls when a count grows.

        Decodes and prefill tokens share one forward pass, so what a pass costs at least is counted once.
        """
        language = _at(self.decodes, decodes) + _at(self.prefill, prefill_tokens)
        if decodes > 0 and prefill_tokens > 0 and self.decodes and self.prefill:
            language -= min(self.decodes[0][1], self.prefill[0][1])
        return language + _at(self.media, media_tokens)

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
    ) -> float:
        """As ``seconds``: it does not hang on what is looked back on."""
        return self.seconds(decodes, prefill_tokens, media_tokens)


def _ascending(samples: Mapping[int, float] | None) -> Table:
    rows: list[tuple[int, float]] = []
    least = math.inf
    for count, seconds in sorted((samples or {}).items(), reverse=True):
        least = min(least, seconds)
        rows.append((count, least))
    return tuple(row for row in reversed(rows) if row[1] < math.inf)


def _at(table: Table, count: int) -> float:
    """On the line between two measurements; at least the first; beyond the last at the steepest known rate."""
    if count <= 0 or not table:
        return 0.0
    place = bisect_right(table, (count, math.inf))
    if place == 0:
        return table[0][1]
    low = table[place - 1]
    slope = _slope(low, table[place]) if place < len(table) else _slope_beyond(table)
    return low[1] + (count - low[0]) * slope


def _slope(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])


def _slope_beyond(table: Table) -> float:
    if len(table) == 1:
        return _slope((0, 0.0), table[0])
    return max(_slope(table[-2], table[-1]), _slope(table[0], table[-1]))


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """How much one step may hold, and the latency bound that this keeps.

    ``tokens``: prefill tokens and decodes. ``media``: visual tokens; at least one whole image always runs.
    ``feasible`` is False where not even one item keeps within ``limit_s`` (seconds; None: no bound).
    ``interference``: how many times longer a step may take than ``cost`` says, which is alone, beside the instance's
    other lane. Raises ``ConfigError`` for a budget below 1.
    """

    tokens: int = 2048
    media: int = 1
    limit_s: float | None = None
    feasible: bool = True
    cost: StepCost | None = None
    interference: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.media < 1:
            raise ConfigError(f"budgets must be at least 1, got tokens={self.tokens}, media={self.media}")
        if self.limit_s is not None:
            _check_limit(self.limit_s)


class BudgetResult(NamedTuple):
    """``budget`` items a step take ``seconds`` (a fresh median). ``samples``: all that was measured, by count.

    ``seconds`` are beside the other lane, where there is one, ``samples`` alone.
    """

    budget: int
    seconds: float
    feasible: bool
    samples: dict[int, float]


def search_budget(
    measure: Callable[[int], float],
    limit_s: float,
    *,
    low: int = 1,
    high: int = MOST_TOKENS,
    knee: float = 0.95,
    warn: bool = True,
    interference: float = 1.0,
) -> BudgetResult:
    """The largest n in [low, high] for which ``measure(n)`` seconds keep within ``limit_s`` (Algorithm 1, line 5).

    A monotone binary search (TriInfer 4.2). The budget is capped at the knee: the smallest n measured whose n per
    second is ``knee`` of the best seen. A feasible result is never one that does not hold: the median of three fresh
    measurements must, else the next smaller candidate is tried. Where ``low`` itself does not hold, returns it with
    ``feasible=False`` and, where ``warn``, a ``TrinityWarning``. ``measure`` may return inf for what cannot run.

    ``interference``: of an instance with two lanes, how many times longer a step takes beside the other lane than
    alone, as it is measured here. The limit is kept beside it: the two budgets hold jointly.

    Raises ``ConfigError`` for bounds without meaning, and where a measurement is negative or NaN.
    """
    _check_limit(limit_s)
    if not 1 <= interference < math.inf:
        raise ConfigError(f"interference is at least 1, got {interference!r}")
    if not (1 <= low <= high and 0 < knee <= 1):
        raise ConfigError(f"a search needs 1 <= low <= high and 0 < knee <= 1, got low={low}, high={high}, knee={knee}")
    search = _Search(lambda count: interference * measure(count), limit_s)
    if search.holds(low):
        search.bisect(low, high)
    for budget in search.candidates(knee):
        seconds = search.median(budget)
        if seconds <= limit_s:
            return BudgetResult(budget, seconds, True, _alone(search, interference))
    return _infeasible(search, low, warn, interference)


def _alone(search: _Search, interference: float) -> dict[int, float]:
    return {count: seconds / interference for count, seconds in search.samples.items()}


def _infeasible(search: _Search, low: int, warn: bool, interference: float) -> BudgetResult:
    seconds = search.median(low)
    feasible = seconds <= search.limit_s
    if warn and not feasible:
        warnings.warn(
            f"{low} item(s) a step take {seconds:.4g} s, above the bound of {search.limit_s:.4g} s: the budget is "
            f"{low} all the same and the SLO will be missed. Loosen the SLO, or use a faster device or smaller model.",
            TrinityWarning,
            stacklevel=3,
        )
    return BudgetResult(low, seconds, feasible, _alone(search, interference))


def budgets_found(
    found: Mapping[str, BudgetResult], image_tokens: int, limit_s: float, interference: float = 1.0
) -> Budgets:
    """From searches by kind of row: "prefill" (tokens) or else "decodes" (rows), and "images" of so many tokens."""
    language = found.get("prefill") or found.get("decodes")
    images = found.get("images")
    samples = {name: result.samples for name, result in found.items()}
    return Budgets(
        tokens=language.budget if language else Budgets().tokens,
        media=images.budget * image_tokens if images else Budgets().media,
        limit_s=limit_s,
        feasible=all(result.feasible for result in found.values()),
        interference=interference,
        cost=StepCost.measured(
            decodes=samples.get("decodes"),
            prefill=samples.get("prefill"),
            media={count * image_tokens: seconds for count, seconds in samples.get("images", {}).items()},
        ),
    )


def predicted_budgets(
    seconds: Callable[[int, int, int], float],
    roles: str,
    limit_s: float,
    image_tokens: int,
    *,
    warn: bool = True,
    interference: float = 1.0,
) -> Budgets:
    """Budgets of an instance of ``roles`` by a cost model; ``image_tokens`` of a usual image, 0 for text alone.

    ``interference`` as in ``search_budget``, where the instance has two lanes.
    """
    found: dict[str, BudgetResult] = {}

    def search(measure: Callable[[int], float], high: int) -> BudgetResult:
        return search_budget(measure, limit_s, high=high, warn=warn, interference=interference)

    if "P" in roles:
        found["prefill"] = search(lambda n: seconds(0, n, 0), MOST_TOKENS)
    if "D" in roles:
        found["decodes"] = search(lambda n: seconds(n, 0, 0), MOST_ROWS)
    if "E" in roles and image_tokens:
        found["images"] = search(lambda n: seconds(0, 0, n * image_tokens), MOST_IMAGES)
    return budgets_found(found, image_tokens, limit_s, interference)


class _Search:
    def __init__(self, measure: Callable[[int], float], limit_s: float) -> None:
        self.measure, self.limit_s = measure, limit_s
        self.samples: dict[int, float] = {}

    def holds(self, count: int) -> bool:
        """Whether ``count`` keeps within the limit in one of a few tries."""
        return any(self.once(count) <= self.limit_s for _ in range(_TRIES))

    def once(self, count: int) -> float:
        seconds = self.measure(count)
        if not seconds >= 0:
            raise ConfigError(f"measuring {count} item(s) gave {seconds!r} seconds; it must be a number of at least 0")
        self.samples[count] = min(seconds, self.samples.get(count, math.inf))
        return seconds

    def median(self, count: int) -> float:
        return sorted(self.once(count) for _ in range(_CONFIRMATIONS))[_CONFIRMATIONS // 2]

    def bisect(self, good: int, high: int) -> None:
        """Double from ``good``, so that nothing far beyond the limit is ever run, then halve the last interval."""
        bad = high + 1
        while good < high and bad > high:
            count = min(2 * good, high)
            good, bad = (count, bad) if self.holds(count) else (good, count)
        while good + 1 < bad:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.holds(middle) else (good, middle)

    def candidates(self, knee: float) -> list[int]:
        """Counts that held once, from the best down; none beyond the knee."""
        rates = {count: count / max(seconds, 1e-12) for count, seconds in self.samples.items()}
        enough = min(count for count, rate in rates.items() if rate >= knee * max(rates.values()))
        held = [count for count, seconds in self.samples.items() if seconds <= self.limit_s and count <= enough]
        return sorted(held, reverse=True)


def _check_limit(limit_s: float) -> None:
    if not 0 < limit_s < math.inf:
        raise ConfigError(f"a latency bound must be a positive number of seconds, got {limit_s!r}")


class BudgetKey(msgspec.Struct, frozen=True, kw_only=True):
    """What budgets hang on. ``model`` is a fingerprint; ``versions`` those of what runs it (torch, ...).

    ``lanes`` and ``cores``: where stages run at once, and whether they share a processor.
    """

    model: str
    dtype: str
    device: str
    threads: int
    roles: str
    limit_s: float
    versions: str = ""
    lanes: tuple[str, ...] = ("joint",)
    cores: tuple[int, ...] = ()


class _Entry(msgspec.Struct, frozen=True):
    key: BudgetKey
    budgets: Budgets


class BudgetCache:
    """Budgets on disk, one small JSON file each. A bad file counts as none and is written anew."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = (cache_folder() if folder is None else Path(folder)) / "budgets"

    def path(self, key: BudgetKey) -> Path:
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"

    def get(self, key: BudgetKey) -> Budgets | None:
        """Budgets found earlier under the same key, or None."""
        try:
            entry = msgspec.json.decode(self.path(key).read_bytes(), type=_Entry)
        except (OSError, ValueError):
            return None
        return entry.budgets if entry.key == key else None

    def put(self, key: BudgetKey, budgets: Budgets) -> bool:
        """Keep budgets; False where the folder cannot be written, which costs a later start its time and no more."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=self.folder, suffix=".part")
        except OSError:
            return False
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(_Entry(key, budgets)))
            os.replace(scratch, self.path(key))
        except OSError:
            with suppress(OSError):
                os.unlink(scratch)
            return False
        return True


def cache_folder() -> Path:
    """$TRINITY_CACHE, else trinity's folder where the platform keeps caches."""
    if chosen := os.environ.get("TRINITY_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "trinity"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "trinity"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "trinity"
