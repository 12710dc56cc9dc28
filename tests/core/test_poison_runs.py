"""Runs in virtual time in which some requests kill what serves them: they are found, and all others are served.

``calm_cluster(seed, POLICY)`` and ``poisoned_cluster(seed, POLICY)`` of ``support.poisoned`` repeat a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from support.other_rules import is_noticed
from support.poisoned import CALM, Poison, calm_cluster, poisoned_cluster, sampling_cluster
from support.reader_checks import TYPED, check_readers
from support.thinned import thinned
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import FrontendCore
from trinity.core.frontend.dispatch import Isolation
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.suspicion import Life, Suspicion
from trinity.core.instance import admission
from trinity.core.messages import Send

DEFAULT = FailurePolicy()
EARLY = FailurePolicy(alone_after=1)
PATIENT = FailurePolicy(recoveries=20, wait_s=60.0)


def play(poison: Poison, limit: int = 300_000) -> Counter[str]:
    """Run a cluster to its end. Returns how its requests ended; "fourth": poison that killed more than three times."""
    cluster, found = poison.cluster, Counter[str]()
    cluster.run(limit)
    check_readers_of(poison)
    core = cluster.frontend
    assert (core.isolation.ward, core.isolation.places) == ("", {})
    assert (core.inputs.waiting_bytes, core.inputs.kept_bytes, core.dispatch.retries.active) == (0, 0, set())
    assert not any(each.state.reserved_as for name, each in cluster.cores.items() if name not in cluster.lives.dead)
    for name, outcome in cluster.outcomes.items():
        assert outcome.end is not None
        kind = outcome.end.failure.error if outcome.end.failure else outcome.end.reason
        found[f"{'poison' if name in poison.stages else 'other'} {kind}"] += 1
        found["fourth"] += len(poison.deaths.get(name, ())) > 3
    return found


def check_readers_of(poison: Poison) -> None:
    """Every reader has what it should; a poison request's has an exact beginning."""
    refused = {name for name, each in poison.cluster.outcomes.items() if is_poison(each.end)}
    kept = dict(poison.cluster.outcomes)
    for name in refused:
        outcome = poison.cluster.outcomes.pop(name)
        assert outcome.tokens == list(range(1, len(outcome.tokens) + 1))
        assert outcome.end is not None
        assert outcome.end.failure is not None
        named = outcome.end.failure.fields["instances"].split(", ")
        assert len(named) >= 3
        died = Counter(instance for deaths in poison.deaths.values() for instance, _ in deaths)
        assert not poison.heard or Counter(named) <= died, "a death is named once"
    check_readers(poison.cluster)
    poison.cluster.outcomes = kept


def is_poison(end: Any) -> bool:
    return end is not None and end.failure is not None and end.failure.error == "PoisonRequest"


def count(seeds: range, make: Callable[[int], Poison]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen += play(make(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return seen


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "policy", [DEFAULT, pytest.param(EARLY, marks=pytest.mark.slow)], ids=["after two", "after one"]
)
def test_poison_is_refused_and_every_other_request_is_whole(policy: FailurePolicy) -> None:
    seen = count(range(40), lambda seed: calm_cluster(seed, policy))
    assert {kind for kind in seen if kind.startswith("other")} == {"other length", "other stop"}
    assert seen["poison PoisonRequest"] > 40
    assert seen["fourth"] <= 1, "whose death was heard of only as it had been sent on"
    typed = sum(number for kind, number in seen.items() if kind.startswith("poison") and kind.endswith("Error"))
    assert typed <= 3, "refused as before, after as many losses"


def test_a_refusal_names_each_death_once() -> None:
    """A target told of the last one too, a failed read, behind its own news: it was named twice."""
    assert play(calm_cluster(30_096, DEFAULT))["poison PoisonRequest"]


def test_an_instance_that_it_was_called_back_from_counts_when_it_dies() -> None:
    """It had died there already: the poison took a fourth one."""
    assert play(calm_cluster(210, EARLY))["fourth"] == 0


@pytest.mark.timeout(900)
def test_poison_that_kills_where_it_is_sampled_takes_three_instances_too() -> None:
    """It dies where it decodes, and then where it is prefilled with its tokens: that is one cause."""
    makes: list[Callable[[int], Poison]] = [
        partial(sampling_cluster, failures=DEFAULT, placement=each) for each in ("E+P+D", "1E1P2D", "EP+D")
    ]
    seen = count(range(24), lambda seed: makes[seed % 3](seed))
    assert {kind for kind in seen if kind.startswith("other")} <= {"other length", "other stop"}
    assert seen["poison PoisonRequest"] > 15
    assert seen["fourth"] == 0


@pytest.mark.parametrize("placement", thinned(CALM, CALM[::2].__contains__))
def test_poison_under_each_placement(placement: str) -> None:
    seen = count(range(900, 920), lambda seed: calm_cluster(seed, DEFAULT, placement))
    assert {kind for kind in seen if kind.startswith("other")} <= {"other length", "other stop"}
    assert seen["poison PoisonRequest"] > 5


def test_the_last_death_is_its_own() -> None:
    """Nothing else was on the instance, nor on its way there."""
    company = Counter[int]()
    for seed in range(16):
        poison = calm_cluster(seed, DEFAULT)
        poison.cluster.run(300_000)
        for name, deaths in poison.deaths.items():
            if is_poison(poison.cluster.outcomes[name].end) and deaths:
                company[deaths[-1][1]] += 1
    assert set(company) == {0}
    assert company[0] > 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_beside_deaths_from_outside_next_to_nobody_else_is_blamed() -> None:
    """Faults, freezes and leases come too."""
    seen = count(range(16), lambda seed: poisoned_cluster(seed, PATIENT))
    known = {*TYPED, "length", "stop", "cancelled", "PoisonRequest"}
    assert {kind.split()[1] for kind in seen if kind != "fourth"} <= known
    assert seen["poison PoisonRequest"] > 5
    assert seen["other PoisonRequest"] <= 3, "died with twice in company, and then struck from outside alone"
    assert seen["fourth"] <= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(5))
def test_many_more_runs_with_poison(part: int) -> None:
    """10,000 in all."""
    calm = count(range(10_000 + part * 1000, 11_000 + part * 1000), lambda seed: calm_cluster(seed, DEFAULT))
    assert {kind for kind in calm if kind.startswith("other")} == {"other length", "other stop"}
    assert calm["fourth"] <= calm["poison PoisonRequest"] // 250
    wild = count(range(20_000 + part * 1000, 21_000 + part * 1000), lambda seed: poisoned_cluster(seed, PATIENT))
    assert wild["other PoisonRequest"] <= wild["other length"] // 100


def test_without_poison_nothing_is_ever_reserved_after_one_death() -> None:
    poison = calm_cluster(5, DEFAULT)
    poison.stages.clear()
    poison.cluster.kill("PD0" if "PD0" in poison.cluster.cores else next(iter(poison.cluster.cores)), 0.3)
    poison.cluster.run()
    messages = [each.message for _, _, each in poison.cluster.commands if isinstance(each, Send)]
    assert not any(type(each).__name__ == "PeerReserved" for each in messages)


# ---------------------------------------------------------------- a rule not kept is noticed


def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is suspected goes on beside all others."""
    monkeypatch.setattr(FrontendRequest, "is_suspect", lambda self, policy: False)


class Everywhere(frozenset[Life]):
    """Every life of every instance."""

    def __contains__(self, each: object) -> bool:
        return True


def assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known to be elsewhere is taken to be gone: instances do not have to say that they are empty."""
    monkeypatch.setattr(Isolation, "_is_empty", lambda self, name: True)
    monkeypatch.setattr(admission, "find_company", lambda s, work: None)
    monkeypatch.setattr(
        Isolation, "empty_places", lambda self, entry: Everywhere() if entry.id == self.ward else frozenset()
    )


def unforgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths that one has died of with another cost it its recoveries, and it is given up for them."""
    monkeypatch.setattr(FrontendRequest, "pardon", lambda self, lives: None)
    suspect = FrontendRequest.is_suspect

    def strict(self: FrontendRequest, policy: FailurePolicy) -> bool:
        return self.recoveries <= policy.recoveries and suspect(self, policy)

    monkeypatch.setattr(FrontendRequest, "is_suspect", strict)


def unlifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told that an instance is open again."""
    monkeypatch.setattr(FrontendCore, "_retry_waiting", lambda self, now: [])


def convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three deaths are enough, whoever else was there."""
    monkeypatch.setattr(Isolation, "empty_places", lambda self, entry: Everywhere())


def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No death is counted."""
    monkeypatch.setattr(Suspicion, "note_death", lambda self, death, now: None)


RULES: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    together: 14,
    assumed: 35,
    unforgiven: 15,
    unlifted: 0,
    convicted: 5,
    unheard: 0,
}
"""And the run in which each was noticed, when this was written."""
LENIENT = FailurePolicy(recoveries=9, wait_s=60.0)


def check_isolation(run: int) -> None:
    """Play one of 400 runs: 200 of each policy."""
    policy, seed = (LENIENT if run >= 200 else DEFAULT), run % 200
    poison = calm_cluster(seed, policy)
    seen = play(poison, limit=30_000)
    assert {kind for kind in seen if kind.startswith("other")} <= {"other length", "other stop"}
    assert seen["fourth"] == 0
    alone = [deaths[-1][1] for name, deaths in poison.deaths.items() if len(deaths) == 3]
    assert not any(alone) or seen["poison PoisonRequest"] == 0
    assert policy.recoveries > 2 or not seen["poison StageError"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("broken", thinned(RULES, lambda rule: RULES[rule] < 10), ids=lambda each: each.__name__)
def test_a_rule_of_isolation_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert is_noticed(check_isolation, range(400), RULES[broken]), broken.__doc__


def test_such_runs_are_whole_where_all_rules_are_kept() -> None:
    for run in {*RULES.values(), 214}:
        check_isolation(run)
