"""The compiled twin and the Python engine tell the same, line by line and to the last bit of every time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import fsum
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_comparison import COMMANDS, EVENTS, REASONS, Case, Line, assert_equal, differences, random_case
from support.scenarios import ORDERS
from support.thinned import thinned
from support.virtual.cluster import make_settings
from trinity.core.instance.settings import Reservation, Settings
from trinity.core.messages import MediaSpan, Work
from trinity.core.transfers import TransferPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.interconnects import Interconnect
from trinity.simulation import compiled_engine
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import COMPLETE, SLO, SLO_RULES

CASES = 200

pytestmark = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no compiled twin: {compiled_engine.why_unavailable()}"
)


def text(number: int, prompt: int, out: int, **rest: object) -> Work:
    return Work(request=str(number), prompt=(0,) * prompt, max_tokens=out, **rest)  # type: ignore[arg-type]


def case_of(placement: str, works: list[Work], times: list[float], cost: LinearCost, **rest: object) -> Case:
    settings = make_settings(placement, {"image": 8, "kv": 400}, transfers=TransferPolicy(kv="off"), **rest)
    cluster = cluster_of(len(settings))
    acts = [(at, number, False) for number, at in enumerate(times)]
    return Case(settings, works, acts, cluster, [cost] * len(settings))


def cluster_of(count: int) -> Cluster:
    return Cluster.of("H100", count, message_s=0.0, link=Interconnect(name="slow", bandwidth=2**23, fixed_s=0.25))


def test_one_request_on_one_instance() -> None:
    # Prefill of 10 tokens takes 1 + 10 * 0.5 s, each decode 1 + 0.25 s.
    cost = LinearCost(step_s=1.0, prefill_s=0.5, decode_s=0.25)
    told = assert_equal(case_of("EPD", [text(0, 10, 3)], [2.0], cost))
    assert told.tokens(0) == [8.0, 9.25, 10.5]
    assert told.reasons == ["length"]
    assert told.busy == [{"E": 0.0, "P": 6.0, "D": 2.5}]
    assert told.peak == [{"image": 0, "kv": 1}]
    assert told.ended == 10.5


def test_an_image_goes_from_encode_to_prefill_to_decode() -> None:
    # The encoder takes 2 s and one image block of 4.5 MiB 0.25 + 0.5625 s; prefill 1 s, 37 KV blocks of 8 MiB
    # 0.25 + 37 s, a decode 1 s.
    cost = LinearCost(step_s=1.0, encode_s=2.0)
    image = MediaSpan("image", 576, 0, 576, "cat")
    told = assert_equal(case_of("E+P+D", [text(0, 580, 2, media=(image,))], [0.0], cost))
    assert told.tokens(0) == [3.8125, 3.8125 + 37.25 + 1.0]
    assert told.moved == {"image": 8192 * 576, "kv": 37 * 16 * 524_288}


def test_a_cancel_and_a_deadline_end_requests_in_their_midst() -> None:
    # The first is prefilled alone until 1, the others beside its decode until 2; all ends are between two steps.
    cost = LinearCost(step_s=1.0)
    works = [text(0, 4, 9), text(1, 4, 9, deadline_s=2.5), text(2, 4, 9)]
    case = case_of("EPD", works, [0.0, 0.0, 0.0], cost)
    told = assert_equal(replace(case, acts=[*case.acts, (3.5, 0, True)]))
    assert told.reasons == ["cancelled", "deadline", "length"]
    assert told.counts.tolist() == [3, 1, 9]


def test_an_offer_is_withdrawn_where_the_deadline_passes_at_its_source() -> None:
    # It comes at 0.5 and is offered as its encoding starts. Its deadline is 1.5 there and 2 at the target; word of the
    # front end's comes to both at those times. The step ends at 2.5, before a Release is here.
    image = MediaSpan("image", 576, 0, 576, "cat")
    works = [text(0, 580, 2, media=(image,), deadline_s=1.0)]
    case = case_of("E+P+D", works, [0.0], LinearCost(encode_s=2.0))
    told = assert_equal(replace(case, cluster=Cluster.of("H100", 3, message_s=0.5)))
    assert told.reasons == ["deadline"]
    assert [line[0] for line in told.log if line[2] == EVENTS.index("Withdraw")] == [3.0]


def test_a_cached_prompt_and_a_shared_image_are_not_computed_again() -> None:
    cost = LinearCost(step_s=1.0, prefill_s=0.1, encode_s=1.0)
    image = MediaSpan("image", 576, 0, 576, "cat")
    works = [text(number, 640, 1, media=(image,)) for number in range(3)]
    told = assert_equal(case_of("EP+D", works, [0.0, 0.5, 300.0], cost))
    opened = [line[5] for line in told.log if line[2] == 20 + COMMANDS.index("open")]
    assert opened == [0, 624, 624], "the others find all but the last block"
    assert sum(line[2] == 20 + COMMANDS.index("encode") for line in told.log) == 1, "the second waits for the first's"


RARE = (608,)  # a deadline that passes at an instance first, by rounding


@pytest.mark.parametrize("seed", [*range(CASES), *RARE])
def test_random_cases_are_equal(seed: int) -> None:
    assert_equal(random_case(seed))


@given(st.integers(min_value=CASES))
def test_any_random_case_is_equal(seed: int) -> None:
    assert_equal(random_case(seed))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_only_judged_is_judged_as_what_is_told(seed: int) -> None:
    """With token times or without: the same requests are in time by each rule, whether or not some have deadlines."""
    case, slo = random_case(seed), SLO(0.3, 0.05)
    arrivals = np.array(sorted(at for at, _, aborts in case.acts if not aborts), np.float64)
    case = replace(case, acts=[(at, number, False) for number, at in enumerate(arrivals.tolist())])
    work, told = case.workload(), case.compiled()
    found = case.deployed().score(work, arrivals, np.arange(len(arrivals), dtype=np.int32), slo)
    served = [
        RequestOutcome(times[0] - at if times else None, [b - a for a, b in pairwise(times)], reason)
        for times, at, reason in zip(map(told.tokens, range(len(arrivals))), arrivals, told.reasons, strict=True)
    ]
    assert {rule: getattr(found, rule) for rule in SLO_RULES} == {
        rule: sum(slo.is_met(o, rule) for o in served) for rule in SLO_RULES
    }
    whole = [(at, o.ttft_s or 0.0, o) for at, o in zip(arrivals, served, strict=True) if o.finish_reason in COMPLETE]
    assert found.first == sum(ttft < slo.ttft for _, ttft, _ in whole)
    assert found.finishes.tolist() == [at + ttft + fsum(o.itl_s) for at, ttft, o in whole]
    assert (found.ended, found.unsettled, found.settled) == (told.ended, 0, len(arrivals))
    assert compiled_engine.to_busy_seconds(found.busy, case.settings) == told.busy
    assert compiled_engine.to_peak_blocks(found.peak, case.settings) == told.peak


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@pytest.mark.timeout(600)
def test_thousands_of_random_cases_are_equal(part: int) -> None:
    for seed in range(10_000 + 1000 * part, 11_000 + 1000 * part):
        assert_equal(random_case(seed))


def test_the_cases_cover_what_the_twin_does() -> None:
    """Every policy, order, switch, event, command and end; hits and later chunks: each many times."""
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        case = random_case(seed)
        told = case.compiled()
        rules = case.settings[0].rules
        seen.update([rules.policy, rules.order, f"chunked {rules.chunked}", f"bounded {rules.limit_encodes}"])
        seen.update({each.roles for each in case.settings} | {str(each.lanes) for each in case.settings})
        seen.update({type(cost).__name__ for cost in case.costs} | {f"ended {reason}" for reason in told.reasons})
        moves = case.settings[0].transfers
        seen.update([f"prefetch {moves.prefetch}", f"early {moves.early}", case.settings[0].reservation])
        seen[f"least loaded {case.least_loaded}"] += 1
        seen["preempted"] += told.preemptions
        seen["nobody gives up"] += not any(act[2] for act in case.acts) and not any(w.deadline_s for w in case.works)
        seen.update(_named(line) for line in told.log)
    wanted = [
        *EVENTS[:6],
        *EVENTS[7:],
        *COMMANDS,
        *ORDERS,
        "alg1",
        "time",
        "prefill_first",
        "E",
        "P",
        "D",
        "EP",
        "ED",
        "PD",
        "EPD",
    ]
    wanted += ["Roofline", "CostTables", "StepCost", "LinearCost", "cached prefix", "later chunk"]
    wanted += [f"ended {reason}" for reason in ("length", "cancelled", "deadline", "error", "stop")]
    wanted += ["full", "optimistic", "preempted", "sent back", "came again"]
    wanted += [f"{name} {on}" for name in ("chunked", "bounded", "prefetch", "early") for on in (True, False)]
    wanted += ["('joint',)", "('vision', 'language')", "nobody gives up", "least loaded True", "least loaded False"]
    assert not {name: seen[name] for name in wanted if seen[name] < 10}


def _named(line: Line) -> str:
    _, _, kind, _, a, b, _ = line
    name = COMMANDS[kind - 20] if kind >= 20 else EVENTS[kind]
    if name == "open" and b:
        return "cached prefix"
    if name == "Finished" and a == REASONS.index("preempted"):
        return "sent back"
    if name == "Submit" and b:
        return "came again"
    return "later chunk" if name == "prefill" and a else name


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_of_one_line_is_found(seed: int) -> None:
    case = random_case(seed)
    told = case.compiled()
    assert not differences(told.log, case.compiled().log), "the twin differs from itself"
    draw = Random(seed)
    at = draw.randrange(len(told.log))
    line = told.log[at]
    later = (line[0] * (1 + 2**-52) + 2**-1074, *line[1:])
    other = (*line[:4], line[4] + 1, *line[5:])
    for changed in ([later], [other], [], [line, line]):
        found = differences(told.log, [*told.log[:at], *changed, *told.log[at + 1 :]])
        assert found.count("line ") >= 1, f"{changed} in place of {line}"


CHANGES = {
    "token_budget": lambda rules: replace(rules, token_budget=rules.token_budget + 1),
    "image_budget": lambda rules: replace(rules, image_budget=rules.image_budget * 50),
    "order": lambda rules: replace(rules, order="sjf" if rules.order == "fcfs" else "fcfs"),
    "policy": lambda rules: replace(rules, policy="alg1" if rules.policy != "alg1" else "prefill_first"),
    "chunked": lambda rules: replace(rules, chunked=not rules.chunked),
    "limit_encodes": lambda rules: replace(rules, limit_encodes=not rules.limit_encodes),
    "limit_decodes": lambda rules: replace(rules, limit_decodes=not rules.limit_decodes),
}


@pytest.mark.parametrize("rule", thinned(CHANGES, [*CHANGES][::3].__contains__))
def test_a_twin_with_another_rule_is_noticed(rule: str) -> None:
    """So the cases hang on every rule: a twin that ignored one would be found out."""
    noticed = 0
    for seed in range(40):
        case = random_case(seed)
        python = case.python().log
        other = [replace(each, rules=CHANGES[rule](each.rules)) for each in case.settings]
        noticed += bool(differences(python, replace(case, settings=other).compiled().log))
    assert noticed >= 2


SWITCHES = (
    *("image_cache", "prefix_cache", "prefetch", "early", "interference", "message_s", "max_waiting", "link"),
    *("reservation", "outputs", "least_loaded"),
)


@pytest.mark.parametrize("switch", thinned(SWITCHES, SWITCHES[::3].__contains__))
def test_a_twin_with_another_switch_is_noticed(switch: str) -> None:
    noticed = 0
    for seed in range(50):
        case = random_case(seed)
        noticed += bool(differences(case.python().log, _switched(case, switch).compiled().log))
    assert noticed >= 2


OTHER: dict[Reservation, Reservation] = {"full": "optimistic", "optimistic": "full"}


def _switched(case: Case, switch: str) -> Case:
    if switch == "least_loaded":
        return replace(case, least_loaded=not case.least_loaded)
    if switch in ("interference", "max_waiting"):
        return replace(case, **{switch: getattr(case, switch) + 1})  # type: ignore[arg-type]
    if switch in ("message_s", "link"):
        cluster = case.cluster
        changed = {
            "message_s": cluster.message_s + 1e-9,
            "link": Interconnect(name="other", bandwidth=5e6, fixed_s=0.02),
        }
        fields = {name: getattr(cluster, name) for name in cluster.__struct_fields__}
        return replace(case, cluster=Cluster(**{**fields, switch: changed[switch]}))
    settings = case.settings
    if switch == "outputs":
        return replace(case, outputs=[max(1, used - 1) for used in case.used])
    if switch == "reservation":
        return replace(case, settings=[replace(each, reservation=OTHER[each.reservation]) for each in settings])
    if switch in ("prefetch", "early"):
        moves = settings[0].transfers
        other = replace(moves, **{switch: not getattr(moves, switch)})  # type: ignore[arg-type]
        return replace(case, settings=[replace(each, transfers=other) for each in settings])
    return replace(case, settings=[_turned(each, switch) for each in settings])


def _turned(each: Settings, cache: str) -> Settings:
    return replace(each, **{cache: not getattr(each, cache)})  # type: ignore[arg-type]


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    # 5 blocks of 16 tokens, and a step takes 1 s. A prompt of 14 gets two, enough until its 20th token is asked for.
    # The elder has the fifth from 19 s on, and the younger waits; at 35 s the elder needs one of its two, and it goes.
    # When the elder has ended, at 38 s, it is prefilled with its 19 tokens.
    cost = LinearCost(step_s=1.0)
    case = case_of("PD", [text(0, 14, 40), text(1, 14, 40)], [0.0, 0.0], cost, reservation="optimistic")
    case = replace(case, settings=[replace(each, pools={"kv": 5}) for each in case.settings], outputs=[38, 30])
    told = assert_equal(case)
    assert told.reasons == ["stop", "stop"]
    assert told.preemptions == 1
    assert told.tokens(0) == [float(at) for at in range(1, 39)]
    assert told.tokens(1) == [float(at) for at in (*range(2, 21), *range(39, 50))]
    opened = [line[3:5] for line in told.log if line[2] == 20 + COMMANDS.index("open")]
    assert opened == [(0, 2), (1, 2), (1, 4)]


def test_where_nobody_can_compute_it_again_it_is_sent_back() -> None:
    cost = LinearCost(step_s=1.0)
    case = case_of("P+D", [text(0, 14, 40), text(1, 14, 40)], [0.0, 0.0], cost, reservation="optimistic")
    small = [replace(each, pools={"kv": 5}) for each in case.settings]
    told = assert_equal(replace(case, settings=small, outputs=[38, 30]))
    assert told.preemptions == 1
    assert told.counts.tolist() == [38, 30]
    submits = [line[1:6] for line in told.log if line[2] == EVENTS.index("Submit")]
    assert submits[-1] == (0, 0, 1, 0, 19), "at the first instance again, with the tokens that it had"


def test_without_the_extension_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_engine, "extension", None)
    assert "not built" in compiled_engine.why_unavailable()


def test_bad_arrays_are_refused() -> None:
    case = case_of("EPD", [text(0, 10, 3)], [2.0], LinearCost())
    for acts, said in ([(0.0, 1, False)], "no request"), ([(-1.0, 0, False)], "out of order"):
        with pytest.raises(ValueError, match=said):
            replace(case, acts=acts).compiled()
    with pytest.raises(ValueError, match="pools"):
        replace(case, settings=[replace(each, pools={"image": -1, "kv": 4}) for each in case.settings]).compiled()
