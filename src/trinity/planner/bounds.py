"""Computes bounds on goodput from stage times alone: one that no replay exceeds, and a nearer one to order candidates.

The upper bound is Hall's condition: for every set of stages, the instances that serve any of them must do all of their
work. Stage times are those of the best batch there can be, so that a step's overhead counts only where KV memory bounds
the batch. The bound is divided by ``share``, since only that share of the requests must be in time. Work that is left
when the last request has arrived may be done afterwards, so the bound is raised by three TTFT bounds in the trace's
length, for decode also by the time that outputs may take.

The nearer one also estimates waits of KV for a decode step in progress, which matter for short outputs whose TBT is
near a step's time. KV that arrives while an instance decodes waits for the end of that step, and the first gap is that
rest and a step of its own: often more than a TBT bound of less than two steps. An output of fewer than ten gaps may not
miss one (TriInfer 5.2), so most requests must find their instance idle, at rates far below what its steps could serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import combinations
from math import ceil, exp, inf, log
from typing import NamedTuple

import numpy as np

from trinity.core.scheduler import latency_bound
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostModel, Device
from trinity.planner.algorithm2 import measure_workload, stage_seconds
from trinity.planner.candidates import Deployment
from trinity.simulation.rate_sweep import TraceRequests, prepare_requests
from trinity.simulation.workload import HASH_TOKENS, Counts
from trinity.stage_kinds import DECODE, PREFILL, order_letters, roles_of, stage_kinds
from trinity.traces.trace import SLO, SLORule, Trace

KV_BLOCK_TOKENS = 16  # tokens of a KV block
QUEUE = 3  # TTFT bounds of work that may be left when the last request has arrived
_BATCHES = tuple(2**n for n in range(17))  # sizes among which the best one is looked for
PULL_S = 0.002  # of a request's KV, about
_TOLERATED = {"p90": 10, "guard": 10, "p99": 100}  # gaps of which one may be late


class Kind(NamedTuple):
    """A kind of device: the cost model of its steps, and ``memory`` in bytes that an instance may use."""

    cost: CostModel
    memory: float

    @classmethod
    def of(cls, device: Device, cost: CostModel, memory_share: float) -> Kind:
        return cls(cost, memory_share * device.memory)


class Need(NamedTuple):
    """Mean demand of a request on each stage, over those that must be served: tokens, and KV blocks held."""

    encode: float
    prefill: float
    decode: float
    held: float  # blocks times decode steps: length of an output times the KV that it holds meanwhile
    own_image: float  # visual tokens of a visual token's own image, on average


class Bounds:
    """Bounds for one trace, SLO and model, on kinds of device by name.

    ``order``: the queues' order; where it is not first come first served, the requests that are left out may be the
    heaviest. ``lanes`` and ``interference`` as of the simulator: an instance with two lanes can do more than one
    second of work in a second. ``offline``: all must be done at the end, and none is late.
    """

    def __init__(
        self,
        trace: Trace,
        slo: SLO,
        model: ModelShape,
        kinds: Mapping[str, Kind],
        *,
        rule: SLORule = "guard",
        stable: bool = True,
        share: float = 0.9,
        order: str = "fcfs",
        lanes: Sequence[str] = ("joint",),
        interference: float = 1.0,
        offline: bool = False,
    ) -> None:
        self.slo, self.model, self.kinds, self.rule = slo, model, kinds, rule
        self.load, requests = measure_workload(trace, model), prepare_requests(trace, model)
        later = requests.sizes.output - 1  # tokens but the first one
        self._gaps = Counter(later[requests.sizes.taken].tolist())
        self.need = _need(requests, 1.0 if order == "fcfs" else share)
        self.share = share if order == "fcfs" else 1.0
        self.both_lanes = min(2.0, max(1.0, 2 / interference)) if len(lanes) > 1 else 1.0
        self.decode_counts = stable or rule in ("guard", "tpot")  # else a starved D may go unseen
        self._queue = 0.0 if offline else QUEUE * slo.ttft / len(trace)
        self._tail = 0.0 if offline else _tail(later, slo) / len(trace)
        self.least = cache(self._least)
        self.usual = cache(self._usual)
        self._asked, self._collisions = share, cache(self._limit_by_waits)

    # ------------------------------------------------------------ the upper bound

    def upper(self, deployment: Deployment) -> float:
        """Compute requests/s that this deployment's goodput cannot exceed; inf where nothing bounds it."""
        return min(self._capacity(deployment, each) for each in _sets(deployment.placement.stages))

    def _capacity(self, deployment: Deployment, stages: str) -> float:
        counted = stages if self.decode_counts else stages.replace(DECODE.letter, "")
        serving = self._count_serving(deployment, counted)
        together = any(does.prefills and does.decodes for does in (roles_of(roles) for roles, _ in serving))
        most = inf
        for name in {name for _, name in serving}:
            seconds = self.least(name, counted, together)
            if seconds:
                speed = sum(n * self._speed(name, *each, counted, together) for each, n in serving.items())
                most = min(most, self._allow_late_work(speed / seconds / self.share, roles_of(counted).decodes))
        return most

    def _count_serving(self, deployment: Deployment, stages: str) -> Counter[tuple[str, str]]:
        """Count the instances that serve any of these stages, by (roles, device)."""
        found: Counter[tuple[str, str]] = Counter()
        for count, roles, name in deployment.groups:
            if set(roles) & set(stages):
                found[roles, name] += count
        return found

    def _speed(self, reference: str, roles: str, name: str, stages: str, together: bool) -> float:
        """Compute the seconds of the reference device's work that one instance does in a second, at its best stage."""
        own = "".join(stage for stage in stages if stage in roles)
        lanes = self.both_lanes if roles_of(own).has_two_parts else 1.0
        if name == reference:
            return lanes
        ratios = [
            self.least(reference, each, together) / self.least(name, each, together)
            for each in _sets(own)
            if self.least(name, each, together)
        ]
        return lanes * max(ratios, default=0.0)

    def _allow_late_work(self, rate: float, decodes: bool) -> float:
        """Solve r = rate · (1 + late · r), where ``late`` · r is the work that may be done after the last arrival."""
        late = rate * (self._queue + (self._tail if decodes else 0.0))
        return rate / (1 - late) if late < 1 else inf

    def _least(self, name: str, stages: str, together: bool) -> float:
        """Compute seconds of one device for these stages of a request, in the best batches.

        ``together``: prefill and decode may share a step, which costs less than both.
        """
        kind, need = self.kinds[name], self.need
        does, encode = roles_of(stages), 0.0
        if does.encodes:
            encode = _best(lambda n: kind.cost.at(0, 0, n, context=0.0, image_tokens=need.own_image), need.encode)
        prefill = need.prefill if does.prefills else 0.0
        decode = need.decode if does.decodes else 0.0
        if together and prefill and decode:
            return encode + self._language(kind, prefill, decode)
        return encode + (self._language(kind, prefill, 0) if prefill else 0.0) + self._language(kind, 0, decode)

    def _language(self, kind: Kind, prefill: float, decode: float) -> float:
        """Compute seconds for these tokens of a request, with as many requests in a step as the KV pool holds."""
        if not prefill and not decode:
            return 0.0
        most = self._rows(kind) / decode if decode else inf
        best = inf
        for requests in [n for n in _BATCHES if n <= most] or [most]:
            best = min(best, self._step(kind, requests, prefill, decode) / requests)
        return min(best, self._step(kind, most, prefill, decode) / most) if most < _BATCHES[-1] else best

    def _step(self, kind: Kind, requests: float, prefill: float, decode: float) -> float:
        tokens, rows = (max(1, int(requests * each)) if each else 0 for each in (prefill, decode))
        prefills = max(1, ceil(requests)) if tokens else 1
        return kind.cost.at(rows, tokens, 0, context=self.load.context, prefills=prefills)

    def _rows(self, kind: Kind) -> float:
        """Compute the most decode rows in a step, on average: KV of the pool over KV of a row."""
        blocks = kind.memory - self.model.weight_bytes(DECODE.letter)
        held = self.need.held / self.need.decode if self.need.decode else 0.0
        return max(1.0, blocks / (KV_BLOCK_TOKENS * self.model.kv_bytes) / held) if held else inf

    # ------------------------------------------------------------ estimates

    def nominal(self, deployment: Deployment) -> float:
        """Compute requests/s at the budgets, by the slowest group of instances."""
        return min(self._group_rates(deployment).values(), default=0.0)

    def likely(self, deployment: Deployment) -> float:
        """Estimate requests/s at which short outputs meet too many steps in progress; inf where that is no limit."""
        serving = self._count_serving(deployment, DECODE.letter)
        served = [each for each in serving if not roles_of(each[0]).prefills]
        if not served or not self.need.decode:
            return inf
        roles, name = max(served, key=lambda each: self._steps(each[1])[1])
        count = sum(n for n, own, _ in deployment.groups if own == roles)
        return self._collisions(roles, name, count)

    def _steps(self, name: str) -> tuple[float, float]:
        """Return seconds to encode an image, and of a step that decodes one request."""
        encode, _, decode = stage_seconds(self.load, self.kinds[name].cost)
        return encode(ceil(self.load.image)) if self.load.image else 0.0, decode(1)

    def _limit_by_waits(self, roles: str, name: str, count: int) -> float:
        encode, step = self._steps(name)
        if not roles_of(roles).encodes:
            return predict_step_waits(count, step, self._gaps, self.slo, self.rule, self._asked)
        return predict_encode_waits(count, encode, step, self._gaps, self.slo, self._asked)

    def bottleneck(self, deployment: Deployment) -> str:
        """Return the letter of the stage that takes most time in the slowest group of instances."""
        rates = self._group_rates(deployment)
        slowest = min(rates, key=lambda roles: rates[roles])
        used = set(slowest) & set(self._stages())
        name = next(name for (roles, name) in self._count_serving(deployment, slowest) if roles == slowest)
        found = order_letters(used) or PREFILL.letter
        return max(found, key=lambda stage: self.usual(name, slowest, stage))

    def _stages(self) -> str:
        tokens = {"media": self.need.encode, "prefill": self.need.prefill, "decodes": self.need.decode}
        return "".join(kind.letter for kind in stage_kinds() if tokens[kind.work])

    def _group_rates(self, deployment: Deployment) -> dict[str, float]:
        """Compute requests/s of the instances of each kind of roles."""
        rates: dict[str, float] = {}
        for (roles, name), count in self._count_serving(deployment, self._stages()).items():
            seconds = self.usual(name, roles, roles)
            rates[roles] = rates.get(roles, 0.0) + (count / seconds if seconds else inf)
        return rates

    def _usual(self, name: str, roles: str, stages: str) -> float:
        """Compute seconds of an instance of ``roles`` for these stages of a request, in batches that keep its bound."""
        kind, need = self.kinds[name], self.need
        encode, image = stage_seconds(self.load, kind.cost)[0], ceil(self.load.image)
        limit = latency_bound(roles, self.slo.ttft, self.slo.tbt)
        seconds = 0.0
        own, does = roles_of(roles), roles_of(stages)
        if does.encodes and need.encode:
            fits = _largest(lambda n: encode(int(n)), limit, image, float(_BATCHES[-1]))
            seconds += need.encode * encode(int(fits)) / fits
        prefill, decode = need.prefill * does.prefills, need.decode * does.decodes
        if not (prefill or decode):
            return seconds
        waits = own.encodes and own.decodes and need.encode and self.both_lanes == 1.0
        if not waits:
            return seconds + self._language_within(kind, limit, inf, prefill, decode)
        # Tokens wait for an image in their step: either that fits too, or images come in a tenth of the steps at most.
        rare = 0.1 * self.load.image / need.encode
        beside, seldom = limit - encode(image), self._language_within(kind, limit, rare, prefill, decode)
        return seconds + min(self._language_within(kind, beside, inf, prefill, decode), seldom)

    def _language_within(self, kind: Kind, limit: float, most: float, prefill: float, decode: float) -> float:
        """Compute seconds of a request in steps of at most ``most`` requests that keep the limit."""
        rows = self._rows(kind) / decode if decode else inf
        least = 1 / max(prefill, decode)
        high = max(least, min(most, rows, _BATCHES[-1] / max(1.0, prefill)))
        fits = _largest(lambda n: self._step(kind, n, prefill, decode), limit, least, high)
        return self._step(kind, fits, prefill, decode) / fits


def _sets(stages: str) -> list[str]:
    """List every set of at least one of these letters."""
    return ["".join(each) for size in range(1, len(stages) + 1) for each in combinations(stages, size)]


def _best(seconds: Callable[[int], float], tokens: float) -> float:
    """Compute seconds for ``tokens`` in batches of the best size."""
    return min(seconds(n) / n for n in _BATCHES) * tokens if tokens else 0.0


def _largest(seconds: Callable[[float], float], limit: float, low: float, high: float) -> float:
    """Find the largest batch between ``low`` and ``high`` that keeps the limit, to 1 %; ``low`` where none does."""
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle)
    return low


def _need(requests: TraceRequests, share: float) -> Need:
    """Average over the lightest ``share`` of the requests, by stage; content that comes again counts once."""
    sizes = requests.sizes
    known, encoded, hashed = _count_repeated(requests)
    tokens = np.where(sizes.taken, sizes.output - 1, 0)
    held = tokens * -(-(sizes.prompt + sizes.output) // KV_BLOCK_TOKENS)
    return Need(
        _lightest(sizes.work - encoded, share),
        _lightest(np.where(sizes.taken, np.maximum(1, sizes.prompt - known - hashed * HASH_TOKENS), 0), share),
        _lightest(tokens, share),
        _lightest(np.where((known > 0) | (hashed > 0), 0, held), share),
        _least_own_image(requests, share),
    )


def _least_own_image(requests: TraceRequests, share: float) -> float:
    """Average a visual token's own image over all that are encoded; the smallest image where some may be left out."""
    sizes = requests.sizes
    visual = int(sizes.work[sizes.taken].sum())
    if share == 1.0 and visual and not requests.shared:
        return int(sizes.squares[sizes.taken].sum()) / visual
    images = [tokens for job in requests.jobs if not job.refused for tokens, _ in job.images]
    return float(min(images, default=0))


def _count_repeated(requests: TraceRequests) -> tuple[Counts, Counts, Counts]:
    """Count visual tokens, their encoding, and hashes, of each request that came before in the trace."""
    known, encoded, hashed = np.zeros((3, len(requests.jobs)), np.int64)
    seen: set[str | int] = set()
    for number, job in enumerate(requests.jobs if requests.shared or requests.sizes.hashed else ()):
        again = [(tokens, work) for (tokens, name), work in zip(job.images, job.works, strict=True) if name in seen]
        known[number] = sum([tokens for tokens, _ in again])
        encoded[number] = sum([work for _, work in again])
        hashed[number] = sum([each in seen for each in job.hash_ids])
        seen.update([content for _, content in job.images])
        seen.update(job.hash_ids)
    return known, encoded, hashed


def _lightest(values: Counts, share: float) -> float:
    kept = np.sort(values)[: ceil(share * len(values))]
    return int(kept.sum()) / len(values)


def _tail(lengths: Counts, slo: SLO) -> float:
    """Compute seconds that outputs may still take after the last arrival, weighted by token.

    A long output has more tokens and takes longer.
    """
    tokens = int(lengths.sum())
    return slo.tbt * int((lengths * lengths).sum()) / tokens if tokens else 0.0


def predict_step_waits(
    count: int, step_s: float, gaps: Mapping[int, int], slo: SLO, rule: SLORule, share: float
) -> float:
    """Estimate requests/s at which too many outputs find a step in progress on ``count`` decode instances in turn.

    ``step_s``: seconds of a step. ``gaps``: number of requests by gaps between their tokens. Returns inf where waits do
    not matter.
    """
    late = _mean({each: _late(each, step_s, slo, rule) for each in gaps}, gaps)
    if late <= 1 - share:
        return inf
    return _arrivals(count, (1 - share) / late) / (step_s * _mean({each: each for each in gaps}, gaps))


def predict_encode_waits(
    count: int, encode_s: float, step_s: float, gaps: Mapping[int, int], slo: SLO, share: float
) -> float:
    """Estimate requests/s at which ``count`` instances encode an image while too many outputs are under way there."""
    exposed = _mean({each: 0 < each < _TOLERATED["guard"] for each in gaps}, gaps)
    if exposed <= 1 - share or encode_s + step_s <= slo.tbt:
        return inf
    return -count * log(1 - (1 - share) / exposed) / (step_s * _mean({each: each for each in gaps}, gaps))


def _mean(values: Mapping[int, float], counts: Mapping[int, int]) -> float:
    total = sum(counts.values())
    return sum(values[each] * count for each, count in counts.items()) / total if total else 0.0


def _late(gaps: int, step_s: float, slo: SLO, rule: SLORule) -> float:
    """Compute the probability that the rest of a step, uniformly drawn, makes an output of this many gaps late."""
    if not gaps or (rule != "tpot" and gaps >= _TOLERATED[rule]):
        return 0.0
    spare = (gaps if rule == "tpot" else 1) * (slo.tbt - step_s) - PULL_S
    return min(1.0, max(0.0, 1 - spare / step_s))


@lru_cache(1 << 12)
def _arrivals(count: int, probability: float) -> float:
    """Find x with this probability that ``count`` arrivals of a Poisson process at rate 1 come within x (Erlang)."""
    low, high = 0.0, 4.0 * count + 50
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(count, middle) < probability else (low, middle)
    return low


def _within(count: int, x: float) -> float:
    term = none = exp(-x)
    for number in range(1, count):
        term *= x / number
        none += term
    return 1 - none
