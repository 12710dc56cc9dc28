"""Optimistic reservation under pressure: nobody starves, nothing hangs, every token is what it would have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_tables import Row, brief, done, emptied, kv_offer, make_core, peer_up, table, work
from scenarios import PLACEMENTS, pressed_cluster
from trinity.core import InstanceCore, growth, preemption
from trinity.core.state import Settings, State
from trinity.messages import (
    PREEMPTED,
    Close,
    Commit,
    Emit,
    Finished,
    Grow,
    Open,
    Pulled,
    Ready,
    Send,
    Step,
    Submit,
    Value,
    Work,
)
from trinity.scheduler import Rules
from trinity.testing.checks import check_state, every_check
from trinity.testing.virtual import Durations, VirtualCluster, settings_of

PER_PLACEMENT = 7
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

    def event(self, name: str, event: Value) -> None:
        self._closed, self._sent_back, self._growing = [], set(), []

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Open):
            self._numbers[command.work.request] = command.work.number
        elif isinstance(command, Close):
            self._closed.append(command.request)
        elif isinstance(command, Send) and isinstance(command.message, Finished):
            self._sent_back |= {command.message.request} if command.message.reason == PREEMPTED else set()
        elif isinstance(command, Grow):
            self._growing += command.blocks

    def settled(self, name: str) -> None:
        self.grown.update(self._growing)
        for request in self._closed:
            state = self.cores[name].state.requests.get(request)
            if request in self._sent_back or (state is not None and state.ending is None):
                older = [each for each in self._growing if self._numbers[each] < self._numbers[request]]
                assert older, f"{request} was preempted for nobody"
                self.preempted[request] += 1

    def quiet(self) -> None:
        """A block that an older one got is the price of each preemption: they are finitely many."""
        for request, count in self.preempted.items():
            number = self._numbers[request]
            older = sum(blocks for each, blocks in self.grown.items() if self._numbers[each] < number)
            assert count <= older, f"{request} was preempted {count} times for {older} blocks"


def checked(cluster: VirtualCluster) -> Seniority:
    """Run it, with one more observer; every request that nobody ended has all its tokens, in order, once."""
    seniority = Seniority(cluster.cores)
    cluster.observers = [*every_check(cluster.cores, cluster.frontend), seniority]
    cluster.run(200_000)
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert outcome.tokens == list(range(1, len(outcome.tokens) + 1))
        if outcome.end.reason == "length":
            assert len(outcome.tokens) == outcome.work.max_tokens
    return seniority


@pytest.mark.parametrize("placement", PLACEMENTS)
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
    configured = settings_of(
        placement,
        {"image": 1, "kv": largest + more},
        rules=Rules(tokens=16, media=8),
        media_block=4,
        kv_block=4,
        reservation="optimistic",
        image_cache=caches,
        prefix_cache=caches,
    )
    if prompts:
        configured = small_prefill(configured, max(-(-len(each.prompt) // 4) for each in works))
    cluster = VirtualCluster(configured, durations=NOW)
    for each in works:
        cluster.submit(each)
    checked(cluster)
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    oldest = cluster.outcomes["r0"].end
    assert oldest is not None
    assert oldest.finished is not None
    assert oldest.finished.preemptions == 0, "the oldest is never preempted"


def small_prefill(configured: list[Settings], blocks: int) -> list[Settings]:
    """With so many KV blocks where requests are prefilled and do not decode."""
    return [
        replace(each, pools=each.pools | {"kv": blocks}) if "P" in each.roles and "D" not in each.roles else each
        for each in configured
    ]


def test_where_no_prefill_pool_holds_the_outputs_too_nobody_is_preempted() -> None:
    """P0 has the blocks of a prompt alone: what is sent back with its outputs would wait there for ever."""
    configured = settings_of(
        "E+P+D",
        {"image": 9, "kv": 36},
        rules=Rules(tokens=64, media=64),
        media_block=4,
        kv_block=4,
        reservation="optimistic",
        prefix_cache=False,
    )
    works = [work(f"r{n}", "cat*8", 7, text=100 * n, max_tokens=[60, 6][n % 2]) for n in range(12)]
    cluster = VirtualCluster(small_prefill(configured, 5), durations=NOW)
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
    configured = settings_of(
        placement,
        {"image": 9, "kv": 36},
        rules=Rules(tokens=64, media=64),
        media_block=4,
        kv_block=4,
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


@pytest.mark.parametrize("placement", ["EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "E+P+PD", "2EPD"])
@pytest.mark.parametrize("caches", [True, False])
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


# ------------------------------------------------------------ one core, command by command


def decoding(**options: Any) -> InstanceCore:
    """ "a" and "b" decode in a pool of five blocks; "a" came first. Each has a text of four, and a block to spare."""
    core = make_core("PD0", kv=5, reservation="optimistic", prefix_cache=False, **options)
    rows: list[Row] = [
        (Submit(work("a", 4, max_tokens=12, number=1)), ["open a kv 0,1", "step 1 joint: prefill a 0+4 last"]),
        (Submit(work("b", 4, max_tokens=12, number=2)), []),
        (done(1, a=9), ["frontend: emit a#0=9", "open b kv 2,3", "step 2 joint: prefill b 0+4 last, decode a"]),
    ]
    table(core, rows)
    return core


def step(core: InstanceCore, number: int, *requests: str) -> list[str]:
    out = brief(core.handle(done(number, **dict.fromkeys(requests, 9)), 0.0))
    check_state(core.state)
    return [line for line in out if "emit" not in line]


def test_a_request_grows_when_its_next_token_has_no_place() -> None:
    core = decoding()
    assert step(core, 2, "a", "b") == ["step 3 joint: decode a b"]
    for number in (3, 4, 5):
        out = step(core, number, "a", "b")
    assert out[0] == "grow a 4"
    assert out[1].startswith("step 6 joint: decode a b")


def test_the_youngest_gives_way_and_is_computed_again_behind_its_prompt() -> None:
    core = decoding()
    for number in (2, 3, 4, 5):
        step(core, number, "a", "b")
    assert step(core, 6, "a", "b") == ["step 7 joint: decode a"], "b waits: it is the youngest itself"
    for number in (7, 8):
        assert step(core, number, "a") == [f"step {number + 1} joint: decode a"]
    out = step(core, 9, "a")
    assert out == ["close b", "grow a 2", "step 10 joint: decode a"]
    assert core.state.requests["b"].preemptions == core.state.preemptions == 1
    assert list(core.state.preempted) == ["b"]
    assert step(core, 10, "a") == ["step 11 joint: decode a"], "its text and a little do not fit yet"
    assert step(core, 11, "a") == ["step 12 joint: decode a"]
    assert step(core, 12, "a")[0] == "frontend: finished a length 12 by way of PD0"
    assert core.state.requests["b"].text == 9, "four of its prompt, five outputs"


def until_preempted(core: InstanceCore, number: int = 1) -> list[str]:
    """What the core says when it preempts for the first time; steps end one after the other until then."""
    while True:
        running = core.state.lanes["joint"][0]
        ended = [row.request for row in running.step.prefills if row.last] + list(running.step.decodes)
        out = step(core, running.step.id, *ended)
        if core.state.preemptions:
            return out


@pytest.mark.parametrize("cached", [True, False])
def test_its_features_are_held_if_they_are_cached_and_encoded_again_if_not(cached: bool) -> None:
    core = make_core("EPD0", kv=6, reservation="optimistic", prefix_cache=False, image_cache=cached)
    core.handle(Submit(work("a", 4, max_tokens=20, number=1)), 0.0)
    core.handle(Submit(work("b", "cat", 1, max_tokens=20, number=2)), 0.0)
    out = until_preempted(core)
    state = core.state.requests["b"]
    assert state.media[0].ready == cached
    assert ("b" in core.state.preempted) == cached
    assert any("encode b.0" in line for line in out) == (not cached), out


def offered(core: InstanceCore, *works: Work) -> InstanceCore:
    """Their KV has come to a decode instance."""
    for number, each in enumerate(works, start=1):
        core.handle(kv_offer(f"P0:{number}", each, (number,)), 0.0)
        core.handle(Ready(f"P0:{number}", (0,)), 0.0)
        core.handle(Commit(f"P0:{number}", (7,)), 0.0)
        core.handle(Pulled(f"P0:{number}", 0), 0.0)
    return core


def test_a_decode_instance_sends_the_youngest_back_with_what_it_has() -> None:
    works = [work(name, 4, text=100 * number, max_tokens=16, number=number) for number, name in [(1, "a"), (2, "b")]]
    core = offered(make_core("D0", kv=5, reservation="optimistic", peers="P0"), *works)
    out = until_preempted(core)
    assert out[:2] == ["close b", "frontend: finished b preempted 5 by way of P0 D0"]
    assert list(core.state.requests) == ["a"]
    assert not core.state.tombstones


@pytest.mark.parametrize(("there", "blocks"), [(3, 4), (4, 2)])
def test_a_decode_instance_reserves_all_for_what_no_prefill_instance_could_compute_again(
    there: int, blocks: int
) -> None:
    """A text of four and thirteen tokens, the last of which is not fed: 16 positions, four blocks."""
    core = make_core("D0", kv=9, reservation="optimistic")
    core.handle(peer_up("P0", kv=there), 0.0)
    core.handle(peer_up("E1", kv=99), 0.0)
    offered(core, work("a", 4, max_tokens=13, number=1))
    assert len(core.state.requests["a"].kv) == blocks
    assert core.state.requests["a"].firm == (blocks == 4)


def test_who_could_not_be_computed_again_is_not_preempted_for_an_older_one() -> None:
    """P0 holds all four blocks that "a" may come to, and not the five of "b", which has them and keeps them."""
    core = make_core("D0", kv=8, reservation="optimistic", prefix_cache=False)
    core.handle(peer_up("P0", kv=4), 0.0)
    works = [work("a", 4, max_tokens=13, number=1), work("b", 4, text=200, max_tokens=17, number=2)]
    offered(core, *works)
    assert {name: len(state.kv) for name, state in core.state.requests.items()} == {"a": 2, "b": 5}
    rows = []
    while len(core.state.requests) == 2:
        running = core.state.lanes["joint"][0].step
        rows.append(running.decodes)
        out = step(core, running.id, *running.decodes)
    assert out[:2] == ["frontend: finished b length 17 by way of P0 D0", "close b"]
    assert set(rows) == {("a",), ("a", "b"), ("b",)}, "the older one waits for the last of its blocks"
    assert not core.state.preemptions


def test_full_reservation_reserves_all_and_never_grows() -> None:
    core = make_core("PD0", kv=16)
    out = brief(core.handle(Submit(work("a", 4, max_tokens=12)), 0.0))
    assert out[0] == "open a kv 0,1,2,3"
    assert not core.announcement().returns
    assert make_core("PD0", reservation="optimistic").announcement().returns


def test_a_request_that_asks_for_little_reserves_no_more_than_it_can_use() -> None:
    core = make_core("PD0", kv=16, reservation="optimistic")
    assert brief(core.handle(Submit(work("a", 4, max_tokens=1)), 0.0))[0] == "open a kv 0"


def test_new_requests_leave_a_block_to_each_that_decodes() -> None:
    core = make_core("PD0", kv=4, reservation="optimistic", prefix_cache=False)
    core.handle(Submit(work("a", 4, max_tokens=12, number=1)), 0.0)
    core.handle(Submit(work("b", 4, max_tokens=12, number=2)), 0.0)
    assert step(core, 1, "a") == ["step 2 joint: decode a"], "two blocks are free, and one is for a"


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
    monkeypatch.setattr(growth, "Grow", lambda blocks: Emit(()))
    hangs_or_starves()


def test_waiting_instead_of_preempting_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_made_room", lambda s, state, now: s.kv.fits(1))
    hangs_or_starves()


def test_a_drained_core_is_idle() -> None:
    emptied(make_core("EPD0", reservation="optimistic"))


def test_works_are_numbered_as_they_come() -> None:
    cluster = crowd("EPD")
    opened = {c.work.request: c.work.number for _, _, c in cluster.commands if isinstance(c, Open)}
    assert opened == {f"r{n}": n + 1 for n in range(12)}
    assert isinstance(cluster.outcomes["r0"].work, Work)
