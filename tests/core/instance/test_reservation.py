"""Optimistic reservation under pressure: nobody starves, nothing hangs, every token is what it would have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.core_tables import work
from support.scenarios import PLACEMENTS, pressed_cluster, small_prefill
from support.thinned import in_turns, rarely, thinned
from support.virtual.checks import make_checks
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.instance import preemption
from trinity.core.instance import preemption as growth
from trinity.core.instance.state import State
from trinity.core.messages import (
    PREEMPTED,
    Close,
    Emit,
    Finished,
    Grow,
    Open,
    Send,
    Step,
    Value,
    Work,
)
from trinity.core.scheduler import BatchRules

PER_PLACEMENT = 6
NOW = Durations(lambda *_: 0.01, lambda *_: 0.1, lambda *_: 0.01)


class Seniority:
    """Whoever is preempted gives way to an older one, which has got a block for it by the end of the same event."""

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self.cores = cores
        self.preempted: Counter[str] = Counter()
        self.grown: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        self._closed: list[str] = []
        self._sent_back: set[str] = set()
        self._growing: list[str] = []
        self._leading: dict[str, bool] = {}  # opened for the beginning of its prompt alone

    def event(self, name: str, event: Value) -> None:
        self._closed, self._sent_back, self._growing = [], set(), []

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Open):
            self._numbers[command.work.request] = command.work.number
            text = self.cores[name].settings.kv_block_size * len(command.blocks)
            self._leading[command.work.request] = text < len(command.work.prompt)
        elif isinstance(command, Close):
            self._closed += [] if self._leading[command.request] else [command.request]
        elif isinstance(command, Send) and isinstance(command.message, Finished):
            self._sent_back |= {command.message.request} if command.message.reason == PREEMPTED else set()
        elif isinstance(command, Grow):
            self._growing += command.blocks

    def after_event(self, name: str) -> None:
        self.grown.update(self._growing)
        for request in self._closed:
            state = self.cores[name].state.requests.get(request)
            if request in self._sent_back or (state is not None and state.ending is None):
                older = [each for each in self._growing if self._numbers[each] < self._numbers[request]]
                assert older, f"{request} was preempted for nobody"
                self.preempted[request] += 1

    def lost(self, name: str) -> None:
        """Nobody dies here."""

    def at_end(self) -> None:
        """A block that an older one got is the price of each preemption: they are finitely many."""
        for request, count in self.preempted.items():
            number = self._numbers[request]
            older = sum(blocks for each, blocks in self.grown.items() if self._numbers[each] < number)
            assert count <= older, f"{request} was preempted {count} times for {older} blocks"


def checked(cluster: VirtualCluster) -> Seniority:
    """Run it, with one more observer; every request that nobody ended has all its tokens, in order, once."""
    seniority = Seniority(cluster.cores)
    cluster.observers = [*make_checks(cluster.cores, cluster.frontend), seniority]
    cluster.run(200_000)
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert outcome.tokens == list(range(1, len(outcome.tokens) + 1))
        if outcome.end.reason == "length":
            assert len(outcome.tokens) == outcome.work.max_tokens
    return seniority


@pytest.mark.parametrize("placement", thinned(PLACEMENTS, PLACEMENTS[::3].__contains__))
def test_everybody_ends_with_the_right_tokens_in_every_interleaving(placement: str) -> None:
    for seed in range(PER_PLACEMENT):
        try:
            checked(pressed_cluster(1000 * PLACEMENTS.index(placement) + seed, placement))
        except BaseException as error:
            error.add_note(f"pressed_cluster({1000 * PLACEMENTS.index(placement) + seed}, {placement!r})")
            raise


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_many_more(part: int) -> None:
    for seed in range(100_000 + part * 1000, 100_000 + part * 1000 + 1000):
        checked(pressed_cluster(seed))


lengths = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 60), st.booleans()), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths, st.sampled_from(["EPD", "EP+D", "ED+P", "E+P+D", "PD+E"]), st.integers(0, 3), st.booleans(), st.booleans()
)
def test_a_pool_that_holds_just_the_largest_request_serves_all(
    sizes: list[tuple[int, int, bool]], placement: str, more: int, caches: bool, prompts: bool
) -> None:
    """Neither deadlock nor starvation with the smallest pools there can be: all end by themselves. ``prompts``: where
    nobody decodes the pool holds the largest prompt, and no outputs behind it."""
    works = [
        work(f"r{n}", *([f"cat{n % 3}"] if image else []), text, text=100 * n, max_tokens=outputs)
        for n, (text, outputs, image) in enumerate(sizes)
    ]
    largest = max(-(-(len(each.prompt) + each.max_tokens - 1) // 4) for each in works)
    configured = make_settings(
        placement,
        {"image": 1, "kv": largest + more},
        rules=BatchRules(token_budget=16, image_budget=8),
        image_block_size=4,
        kv_block_size=4,
        reservation="optimistic",
        image_cache=caches,
        prefix_cache=caches,
    )
    if prompts:
        configured = small_prefill(configured, works)
    cluster = VirtualCluster(configured, durations=NOW)
    for each in works:
        cluster.submit(each)
    checked(cluster)
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    oldest = cluster.outcomes["r0"].end
    assert oldest is not None
    assert oldest.finished is not None
    assert oldest.finished.preemptions == 0, "the oldest is never preempted"


def test_where_no_prefill_pool_holds_the_outputs_too_nobody_is_preempted() -> None:
    """P0 has the blocks of a prompt alone: what is sent back with its outputs would wait there for ever."""
    configured = make_settings(
        "E+P+D",
        {"image": 9, "kv": 36},
        rules=BatchRules(token_budget=64, image_budget=64),
        image_block_size=4,
        kv_block_size=4,
        reservation="optimistic",
        prefix_cache=False,
    )
    works = [work(f"r{n}", "cat*8", 7, text=100 * n, max_tokens=[60, 6][n % 2]) for n in range(12)]
    cluster = VirtualCluster(small_prefill(configured, works), durations=NOW)
    for number, each in enumerate(works):
        cluster.submit(each, at=number * 0.05)
    checked(cluster)
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    for name in [each.request for each in works if each.max_tokens == 60]:
        end = cluster.outcomes[name].end
        assert end is not None
        assert end.finished is not None
        assert end.finished.preemptions == 0, f"{name} could not have been computed again"


def crowd(placement: str, reservation: str = "optimistic", **options: object) -> VirtualCluster:
    """Twelve requests that ask for 60 tokens, in a pool for one and a half of them; every one begins alike."""
    configured = make_settings(
        placement,
        {"image": 9, "kv": 36},
        rules=BatchRules(token_budget=64, image_budget=64),
        image_block_size=4,
        kv_block_size=4,
        reservation=reservation,
        **options,
    )
    cluster = VirtualCluster(configured, durations=NOW)
    for number in range(12):
        cluster.submit(work(f"r{number}", f"cat{number % 2}*8", 7, max_tokens=60), at=number * 0.05)
    checked(cluster)
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    return cluster


def most_at_once(cluster: VirtualCluster) -> int:
    return max(len(command.decodes) for _, _, command in cluster.commands if isinstance(command, Step))


@pytest.mark.parametrize(
    ("placement", "caches"),
    [
        pytest.param(placement, caches, marks=rarely(often))
        for placement, caches, often in in_turns(
            ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "E+P+PD", "2EPD"), (True, False), 2
        )
    ],
)
def test_more_decode_at_once_and_some_are_preempted(placement: str, caches: bool) -> None:
    """Of the twelve a full reservation has one at a time in the pool; and what is said of preemptions adds up."""
    cluster = crowd(placement, image_cache=caches, prefix_cache=caches)
    ends = [outcome.end.finished for outcome in cluster.outcomes.values() if outcome.end]
    told = sum(end.preemptions for end in ends if end)
    assert told == sum(core.state.preemptions for core in cluster.cores.values()) > 0
    full = crowd(placement, "full", image_cache=caches, prefix_cache=caches)
    assert most_at_once(cluster) > most_at_once(full)
    assert not any(isinstance(command, Grow) for _, _, command in full.commands)


def test_where_prefill_is_elsewhere_the_request_goes_round_again_by_way_of_its_first_stage() -> None:
    cluster = crowd("E+P+D")
    back = [outcome.end.finished for outcome in cluster.outcomes.values() if outcome.end and outcome.end.finished]
    twice = [end for end in back if end.preemptions]
    assert twice
    for end in twice:
        assert end.route == ("E0", "P0", "D0") * (end.preemptions + 1)
        assert {each["kind"] for each in end.transfers} == {"image", "kv"}


# ------------------------------------------------------------ broken on purpose


def hangs_or_starves() -> None:
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        _many()


def _many() -> None:
    for seed in range(300):
        checked(pressed_cluster(seed))


def test_preempting_the_oldest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "age", lambda state: (-state.work.number, state.work.request))
    hangs_or_starves()


def test_a_preempted_request_without_its_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = preemption.recompute

    def forgetful(s: State, state: object, now: float) -> None:
        state.tokens.clear()  # type: ignore[attr-defined]
        whole(s, state, now)  # type: ignore[arg-type]

    monkeypatch.setattr(preemption, "recompute", forgetful)
    hangs_or_starves()


def test_growing_without_a_word_to_the_stages_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "Grow", lambda blocks: Emit((), (), (), ()))
    hangs_or_starves()


def test_waiting_instead_of_preempting_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_make_room", lambda s, state, now: s.kv.fits(1))
    hangs_or_starves()


def test_works_are_numbered_as_they_come() -> None:
    cluster = crowd("EPD")
    opened = {c.work.request: c.work.number for _, _, c in cluster.commands if isinstance(c, Open)}
    assert opened == {f"r{n}": n + 1 for n in range(12)}
    assert isinstance(cluster.outcomes["r0"].work, Work)
