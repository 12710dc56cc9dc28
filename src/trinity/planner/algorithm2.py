"""Algorithm 2 (TriInfer 4.4), by the numbers of its lines; made precise where the paper leaves it open.

- ``measure_workload``: lines 1 to 5.
- ``profile_device``: lines 6 to 11.
- ``partition``: line 12.
- ``choose_placements``: lines 14 to 16.
- ``choose_best``: lines 13 and 17 to 23.

Nothing is simulated here: the caller passes the function that replays a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor
from typing import Literal, NamedTuple, TypeVar

from trinity.costs.budgets import search_budget
from trinity.costs.model_shape import ModelShape
from trinity.costs.pool_sizes import IMAGE_SHARE
from trinity.costs.step_cost import CostModel
from trinity.errors import ConfigError, TraceError
from trinity.placement import Group, Placement
from trinity.simulation.rate_sweep import prepare_requests
from trinity.stage_kinds import DECODE, ENCODE, PREFILL, roles_of
from trinity.traces.trace import SLO, Trace

ENCODE_SHARE = 0.5  # α of the paper, of the TTFT bound, for one encode batch
PREFILL_SHARE = 0.5  # β, of the TTFT bound, for one prefill batch
CACHE_SHARE = 0.9  # γ, of the memory that weights leave, for caches
LARGEST = 65_536  # tokens or rows that a budget may come to
LEAST_S = 1e-9  # of a step: a cost model may leave a stage out, and its throughput is a number all the same
E, P, D = ENCODE.letter, PREFILL.letter, DECODE.letter
Split = Literal["largest_remainder", "minimax"]
Method = TypeVar("Method")


class Stages(NamedTuple):
    """One figure for each stage."""

    e: float
    p: float
    d: float


class Workload(NamedTuple):
    """Tokens of a whole trace, and means of them.

    - ``requests``: that the model can take.
    - ``visual`` (tokens): W_e, by what encoding costs: a video's or clip's tokens may cost more than an image's.
    - ``prompt`` (tokens): W_p, with visual ones.
    - ``decode`` (tokens): W_d.
    - ``context`` (tokens): mean context length of a decode.
    - ``image`` (tokens): mean visual tokens of an image.
    - ``own_image`` (tokens): visual tokens of a visual token's own image, on average.
    """

    requests: int
    visual: int
    prompt: int
    decode: int
    context: float
    image: float
    own_image: float = 0.0

    @property
    def multimodal(self) -> bool:
        return self.visual > 0

    @property
    def mean_prompt(self) -> float:
        return self.prompt / self.requests


class Profile(NamedTuple):
    """``budgets`` τ in tokens a batch, ``throughput`` tp in tokens/s, ``seconds`` t of one instance for the trace."""

    budgets: Stages
    throughput: Stages
    seconds: Stages


def measure_workload(trace: Trace, model: ModelShape) -> Workload:
    """Compute lines 1 to 5, for the requests that the model can take.

    The first token of an output comes from prefill, so D decodes one token fewer. Raises ``TraceError`` where there is
    no such request, or a time stamp is invalid.
    """
    prepared = prepare_requests(trace, model)
    sizes = prepared.sizes
    prompts, images = sizes.prompt[sizes.taken], int(sizes.images[sizes.taken].sum())
    if not len(prompts):
        if not len(trace):
            raise TraceError("an empty trace cannot be planned on: serve or load some requests first")
        why = ", or ".join(sorted({job.refused for job in prepared.jobs}))
        raise TraceError(f"{model.name} can serve none of the trace's {len(trace):,} requests: they are {why}")
    tokens = sizes.output[sizes.taken] - 1
    visual = int(sizes.work[sizes.taken].sum())  # line 3
    prompt = int(prompts.sum())  # line 4
    decode = int(tokens.sum())  # line 5
    looked_at = int((tokens * prompts + tokens * (tokens + 1) // 2).sum())
    context = looked_at / decode if decode else prompt / len(prompts)
    own = int(sizes.squares[sizes.taken].sum()) / visual if visual else 0.0
    return Workload(len(prompts), visual, prompt, decode, context, visual / images if images else 0.0, own)


def profile_device(load: Workload, cost: CostModel, slo: SLO, model: ModelShape, capacity: float) -> Profile:
    """Compute lines 6 to 11 for one device: ``cost`` of its steps, ``capacity`` in bytes, all of its memory.

    An idle stage takes 0 s.
    """
    encode, prefill, decode = stage_seconds(load, cost)
    budgets = Stages(
        max(_budget(encode, ENCODE_SHARE * slo.ttft), ceil(load.image))
        if load.visual
        else 0,  # line 6: a whole image runs
        _budget(prefill, PREFILL_SHARE * slo.ttft),  # line 7
        min(_budget(decode, slo.tbt), memory_bound(load, model, capacity)),  # lines 8 and 9
    )
    throughput = Stages(  # line 10
        budgets.e / encode(int(budgets.e)) if load.visual else 0.0,
        budgets.p / prefill(int(budgets.p)),
        budgets.d / decode(int(budgets.d)),
    )
    seconds = Stages(  # line 11
        load.visual / throughput.e if load.visual else 0.0, load.prompt / throughput.p, load.decode / throughput.d
    )
    return Profile(budgets, throughput, seconds)


def stage_seconds(load: Workload, cost: CostModel) -> tuple[Callable[[int], float], ...]:
    """Return three functions: seconds of n visual tokens, n prompt tokens or n decodes in a batch."""

    def encode(tokens: int) -> float:
        return max(LEAST_S, cost.at(0, 0, tokens, context=0.0, image_tokens=load.own_image))

    def prefill(tokens: int) -> float:
        prompts = ceil(tokens / max(1.0, load.mean_prompt))
        return max(LEAST_S, cost.at(0, tokens, 0, context=0.0, prefills=max(1, prompts)))

    def decode(rows: int) -> float:
        return max(LEAST_S, cost.at(rows, 0, 0, context=load.context))

    return encode, prefill, decode


def _budget(seconds: Callable[[int], float], limit_s: float) -> int:
    """Find the largest batch within the limit, up to the knee of its throughput; 1 where not even one item fits."""
    return 1 if seconds(1) > limit_s else search_budget(seconds, limit_s, high=LARGEST).budget


def memory_bound(load: Workload, model: ModelShape, capacity: float, roles: str = D) -> int:
    """Compute line 9 in consistent units: requests whose KV fits into γ of what the weights leave; at least 1.

    The paper divides bytes by tokens; a request's KV is ``kv_bytes`` for each of its (W_p + W_d) / N_r tokens. Where
    the instance also holds images, they have a tenth of the rest.
    """
    rest = capacity - model.weight_bytes(roles)
    if roles_of(roles).encodes:
        rest *= 1 - IMAGE_SHARE
    each = model.kv_bytes * (load.prompt + load.decode) / load.requests
    return max(1, floor(CACHE_SHARE * rest / each))


# ---------------------------------------------------------------- line 12


def partition(count: int, seconds: Sequence[float], split: Split = "largest_remainder") -> tuple[int, ...]:
    """Divide ``count`` instances among stages by their seconds, at least one each; ties go to the first.

    By largest remainder, or (``minimax``) one by one to the stage with the most seconds an instance. Raises
    ``ConfigError`` where there are fewer instances than stages.
    """
    if count < len(seconds):
        raise ConfigError(f"{len(seconds)} stages need at least as many instances, got {count}")
    return _minimax(count, seconds) if split == "minimax" else _largest_remainder(count, seconds)


def _largest_remainder(count: int, seconds: Sequence[float]) -> tuple[int, ...]:
    total = sum(seconds)
    quotas = [count * each / total if total else count / len(seconds) for each in seconds]
    counts = [max(1, floor(quota)) for quota in quotas]
    while sum(counts) < count:
        counts[_first_most([quota - n for quota, n in zip(quotas, counts, strict=True)])] += 1
    while sum(counts) > count:  # the floors of one gave more away than there is
        over = [n - quota if n > 1 else float("-inf") for quota, n in zip(quotas, counts, strict=True)]
        counts[_first_most(over)] -= 1
    return tuple(counts)


def _minimax(count: int, seconds: Sequence[float]) -> tuple[int, ...]:
    counts = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        counts[_first_most([each / n for each, n in zip(seconds, counts, strict=True)])] += 1
    return tuple(counts)


def _first_most(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: (values[place], -place))


# ---------------------------------------------------------------- lines 14 to 16, and 13, 17 to 23


def choose_placements(count: int, seconds: Stages, split: Split = "largest_remainder") -> list[Placement]:
    """List the placements that Algorithm 2 replays for ``count`` instances, in its order: E+P+D, EP+D, ED+P.

    The paper leaves open fewer than three instances, and text alone. Here one instance is EPD; two are EP+D, ED+P or
    PD+E; a trace without images has no E: P+D, and PD on every instance.
    """
    if count < 1:
        raise ConfigError(f"a plan is for at least 1 instance, got {count}")
    if not seconds.e:
        whole = [_make_placement((count, P + D))]
        if count == 1:
            return whole
        p, d = partition(count, (seconds.p, seconds.d), split)
        return [_make_placement((p, P), (d, D)), *whole]
    if count == 1:
        return [_make_placement((1, E + P + D))]
    if count == 2:
        return [
            _make_placement((1, E + P), (1, D)),
            _make_placement((1, E + D), (1, P)),
            _make_placement((1, P + D), (1, E)),
        ]
    e, p, d = partition(count, seconds, split)  # line 12
    return [
        _make_placement((e, E), (p, P), (d, D)),  # line 14
        _make_placement((e + p, E + P), (d, D)),  # line 15
        _make_placement((e + d, E + D), (p, P)),  # line 16
    ]


def _make_placement(*groups: tuple[int, str]) -> Placement:
    return Placement.of(Group(count, roles) for count, roles in groups)


def choose_best(
    methods: Iterable[Method], replay_trace: Callable[[Method, float], float]
) -> tuple[Method | None, float]:
    """Run lines 13 and 17 to 23: return the first with a strictly greater goodput; None where all have 0.

    ``replay_trace(method, above)`` returns its goodput, or any value up to ``above`` where it has no more than that.
    """
    best, best_goodput = None, 0.0  # line 13
    for method in methods:  # line 17
        goodput = replay_trace(method, best_goodput)  # lines 18 and 19
        if goodput > best_goodput:  # line 20
            best, best_goodput = method, goodput  # lines 21 and 22
    return best, best_goodput  # line 23
