"""Token and image budgets of a step (TriInfer, Algorithm 1): searched by measurement, predicted or cached."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from trinity.errors import ConfigError, warn_caller
from trinity.errors.arguments import KeywordsByName, Number, Whole, check_call, check_struct
from trinity.errors.cache_files import cache_folder, read_cached, write_cached
from trinity.stage_kinds import roles_of

CostCurve = Annotated[  # (count, seconds), ascending in both
    tuple[tuple[int, float], ...],
    msgspec.Meta(description="counts (from 1) and seconds (finite) must ascend, as StepCost.from_samples makes them"),
]
MAX_DECODE_ROWS = 512  # decode rows of the largest step tried: throughput saturates before (TriInfer figure 3)
MAX_PREFILL_TOKENS = 8192
MAX_STEP_IMAGES = 64
_CONFIRMATIONS = 3  # fresh measurements, of which the median decides
_TRIES = 2  # measurements of a count that is too slow: noise only ever adds time


class StepCost(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Cost model of a step, interpolated from measurements of each kind of row alone.

    Each curve has (count, seconds), ascending in both, as ``StepCost.from_samples`` makes them. A kind without a curve
    costs nothing. Raises ``ConfigError`` for what is no curve, and for one out of order.
    """

    decodes: CostCurve = ()
    prefill: CostCurve = ()
    media: CostCurve = ()

    def __post_init__(self) -> None:
        check_struct(self)
        for name, table in (("decodes", self.decodes), ("prefill", self.prefill), ("media", self.media)):
            pairs = zip(((0, 0.0), *table), table, strict=False)
            wrong = next((at for at, ((m, s), (n, t)) in enumerate(pairs) if not (m < n and s <= t)), None)
            if wrong is not None:
                count, seconds = table[wrong]
                raise ConfigError(
                    f"cost table {name!r} must ascend in count (from 1) and seconds, and entry {wrong} has "
                    f"({count!r}, {seconds!r}); use StepCost.from_samples"
                )

    @classmethod
    @check_call
    def from_samples(
        cls,
        decodes: Mapping[Whole, Number] | None = None,
        prefill: Mapping[Whole, Number] | None = None,
        media: Mapping[Whole, Number] | None = None,
    ) -> StepCost:
        """Build curves from seconds by count. Times that fall as the count grows are noise: the lower one is kept.

        Raises ``ConfigError`` for counts below 1 and for times that are not finite numbers of at least 0.
        """
        return cls(decodes=_ascending(decodes), prefill=_ascending(prefill), media=_ascending(media))

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Seconds of one step with these rows; never falls when a count grows.

        Decodes and prefill tokens share one forward pass, so its fixed cost counts once.
        """
        language = _interpolate(self.decodes, decodes) + _interpolate(self.prefill, prefill_tokens)
        if decodes > 0 and prefill_tokens > 0 and self.decodes and self.prefill:
            language -= min(self.decodes[0][1], self.prefill[0][1])
        return language + _interpolate(self.media, media_tokens)

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
        image_tokens: float = 0.0,
    ) -> float:
        """Seconds as ``seconds``: they do not depend on the context or on an image's size."""
        return self.seconds(decodes, prefill_tokens, media_tokens)


def _ascending(samples: Mapping[int, float] | None) -> CostCurve:
    rows: list[tuple[int, float]] = []
    least = math.inf
    for count, seconds in sorted((samples or {}).items(), reverse=True):
        least = min(least, seconds)
        rows.append((count, least))
    return tuple(reversed(rows))


def _interpolate(table: CostCurve, count: int) -> float:
    """Interpolate linearly; at least the first measurement, and beyond the last at the steepest known slope."""
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


def _slope_beyond(table: CostCurve) -> float:
    if len(table) == 1:
        return _slope((0, 0.0), table[0])
    return max(_slope(table[-2], table[-1]), _slope(table[0], table[-1]))


class StepBudgets(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Most work of one step, and the latency bound that this keeps.

    - ``token_budget`` (tokens, 2048): prefill tokens and decodes.
    - ``image_budget`` (visual tokens, 1): at least one whole image always runs.
    - ``limit_s`` (seconds, None): the bound; None is no bound.
    - ``feasible`` (True): False where not even one item keeps within ``limit_s``.
    - ``cost`` (None): the measured seconds of a step, alone on its instance.
    - ``interference`` (1.0): factor on ``cost`` while the instance's other lane is busy.

    Raises ``ConfigError`` for a budget below 1.
    """

    token_budget: Whole = 2048
    image_budget: Whole = 1
    limit_s: float | None = None
    feasible: bool = True
    cost: StepCost | None = None
    interference: float = 1.0

    def __post_init__(self) -> None:
        check_struct(self)
        if self.limit_s is not None:
            _check_limit(self.limit_s)


class BudgetResult(NamedTuple):
    """Result of a budget search.

    ``budget`` items a step take ``seconds`` (a fresh median, beside the other lane where there is one).
    ``samples``: all measurements in seconds by count, of a step alone; none of what could not run.
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
    high: int = MAX_PREFILL_TOKENS,
    knee: float = 0.95,
    warn: bool = True,
    interference: float = 1.0,
) -> BudgetResult:
    """Search for the largest n in [low, high] that keeps within ``limit_s`` (TriInfer 4.2, Algorithm 1, line 5).

    A monotone binary search. The result is confirmed by the median of three fresh measurements, or else the next
    smaller candidate is tried. Where ``low`` itself is too slow, returns it with ``feasible=False``.

    measure: runs a step of n items, alone; returns its seconds, inf for a step that cannot run.
    limit_s (s): latency bound of a step.
    low, high (items, 1 and 8192): bounds of the search.
    knee (share, 0.95): caps the budget at the smallest n whose throughput is this share of the best measured.
    warn (True): issues a ``TrinityWarning`` where the result is not feasible.
    interference (factor, 1): how much longer a step takes beside the other lane of its instance. The limit is kept
        beside that lane: the budgets of both lanes hold jointly.

    Raises ``ConfigError`` for bounds out of range, and where a measurement is negative or NaN.
    """
    _check_limit(limit_s)
    if not 1 <= interference < math.inf:
        raise ConfigError(f"interference is at least 1, got {interference!r}")
    if not (1 <= low <= high and 0 < knee <= 1):
        raise ConfigError(f"a search needs 1 <= low <= high and 0 < knee <= 1, got low={low}, high={high}, knee={knee}")
    search = _Search(lambda count: interference * measure(count), limit_s)
    if search.keeps_limit(low):
        search.bisect(low, high)
    for budget in search.candidates(knee):
        seconds = search.median(budget)
        if seconds <= limit_s:
            return BudgetResult(budget, seconds, True, _samples_alone(search, interference))
    return _infeasible(search, low, warn, interference)


def _samples_alone(search: _Search, interference: float) -> dict[int, float]:
    return {count: seconds / interference for count, seconds in search.samples.items() if seconds < math.inf}


def _infeasible(search: _Search, low: int, warn: bool, interference: float) -> BudgetResult:
    seconds = search.median(low)
    feasible = seconds <= search.limit_s
    if warn and not feasible:
        warn_caller(
            f"{low} item(s) a step take {seconds:.4g} s, above the bound of {search.limit_s:.4g} s: the budget is "
            f"still {low} and the SLO will be missed. Loosen the SLO, or use a faster device or smaller model.",
        )
    return BudgetResult(low, seconds, feasible, _samples_alone(search, interference))


def combine_budgets(
    found: Mapping[str, BudgetResult], image_tokens: int, limit_s: float, interference: float = 1.0
) -> StepBudgets:
    """Combine searches by kind of row: "prefill" (tokens), else "decodes" (rows); "images" of ``image_tokens`` each."""
    language = found.get("prefill") or found.get("decodes")
    images = found.get("images")
    samples = {name: result.samples for name, result in found.items()}
    return StepBudgets(
        token_budget=language.budget if language else StepBudgets().token_budget,
        image_budget=images.budget * image_tokens if images else StepBudgets().image_budget,
        limit_s=limit_s,
        feasible=all(result.feasible for result in found.values()),
        interference=interference,
        cost=StepCost.from_samples(
            decodes=samples.get("decodes"),
            prefill=samples.get("prefill"),
            media={count * image_tokens: seconds for count, seconds in samples.get("images", {}).items()},
        ),
    )


def predict_budgets(
    seconds: Callable[[int, int, int], float],
    roles: str,
    limit_s: float,
    image_tokens: int,
    *,
    warn: bool = True,
    interference: float = 1.0,
) -> StepBudgets:
    """Predict the budgets of an instance of ``roles`` with a cost model.

    ``image_tokens``: visual tokens of a typical image, 0 for text alone. ``interference``: as in ``search_budget``.
    """
    found: dict[str, BudgetResult] = {}

    def search(measure: Callable[[int], float], high: int) -> BudgetResult:
        return search_budget(measure, limit_s, high=high, warn=warn, interference=interference)

    does = roles_of(roles)
    if does.prefills:
        found["prefill"] = search(lambda n: seconds(0, n, 0), MAX_PREFILL_TOKENS)
    if does.decodes:
        found["decodes"] = search(lambda n: seconds(n, 0, 0), MAX_DECODE_ROWS)
    if does.encodes and image_tokens:
        found["images"] = search(lambda n: seconds(0, 0, n * image_tokens), MAX_STEP_IMAGES)
    return combine_budgets(found, image_tokens, limit_s, interference)


class _Search:
    def __init__(self, measure: Callable[[int], float], limit_s: float) -> None:
        self.measure, self.limit_s = measure, limit_s
        self.samples: dict[int, float] = {}

    def keeps_limit(self, count: int) -> bool:
        """Check that ``count`` keeps within the limit in one of a few tries."""
        return any(self.measure_once(count) <= self.limit_s for _ in range(_TRIES))

    def measure_once(self, count: int) -> float:
        seconds = self.measure(count)
        if not seconds >= 0:
            raise ConfigError(f"measuring {count} item(s) gave {seconds!r} seconds; it must be a number of at least 0")
        self.samples[count] = min(seconds, self.samples.get(count, math.inf))
        return seconds

    def median(self, count: int) -> float:
        return sorted(self.measure_once(count) for _ in range(_CONFIRMATIONS))[_CONFIRMATIONS // 2]

    def bisect(self, good: int, high: int) -> None:
        """Double from ``good``, so that nothing far beyond the limit ever runs, then halve the last interval."""
        bad = high + 1
        while good < high and bad > high:
            count = min(2 * good, high)
            good, bad = (count, bad) if self.keeps_limit(count) else (good, count)
        while good + 1 < bad:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.keeps_limit(middle) else (good, middle)

    def candidates(self, knee: float) -> list[int]:
        """Counts that kept the limit once, largest first; none beyond the knee."""
        rates = {count: count / max(seconds, 1e-12) for count, seconds in self.samples.items()}
        enough = min(count for count, rate in rates.items() if rate >= knee * max(rates.values()))
        fitting = [count for count, seconds in self.samples.items() if seconds <= self.limit_s and count <= enough]
        return sorted(fitting, reverse=True)


def _check_limit(limit_s: float) -> None:
    if not 0 < limit_s < math.inf:
        raise ConfigError(f"a latency bound must be a positive number of seconds, got {limit_s!r}")


class BudgetKey(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that measured budgets depend on.

    ``model`` is a fingerprint; ``versions`` those of the libraries that run it (torch, ...). ``lanes``: groups of
    stages that run at once. ``cores``: the CPU cores that they are pinned to.
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
    budgets: StepBudgets


class BudgetCache:
    """Cache of budgets on disk, one small JSON file each. A bad file counts as missing and is rewritten."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = (cache_folder() if folder is None else Path(folder)) / "budgets"

    def path(self, key: BudgetKey) -> Path:
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"

    def get(self, key: BudgetKey) -> StepBudgets | None:
        """Get budgets stored under the same key, or None."""
        try:
            entry = msgspec.json.decode(read_cached(self.path(key)) or b"", type=_Entry)
        except ValueError:
            return None
        return entry.budgets if entry.key == key else None

    def put(self, key: BudgetKey, budgets: StepBudgets) -> bool:
        """Store budgets. Returns False where the folder cannot be written; a later start then measures again."""
        return write_cached(self.path(key), msgspec.json.encode(_Entry(key, budgets)))
