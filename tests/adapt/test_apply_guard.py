"""The guard of proposals that apply themselves: a table of events and decisions, and promises in random orders."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from trinity.adapt.apply_guard import HOUR_S, ApplyDecision, ApplyGuard, ApplyRules, has_same_roles
from trinity.adapt.drift import DemandShift
from trinity.adapt.replanner import Proposal
from trinity.errors import ConfigError

RULES = ApplyRules(least_gain=1.2, cooldown_s=100, most_per_hour=3, fresh_s=30, retry_s=5, tries=2)
STILL = dict.fromkeys("EPD", 0.1)
SHIFT = DemandShift(at_s=0, since_s=0, stage="D", before=STILL, after={**STILL, "D": 0.4})


def proposal(placement: str = "1P2D", instead_of: str = "2P1D", gain: float = 2.0) -> Proposal:
    return Proposal(at_s=0, placement=placement, instead_of=instead_of, shift=SHIFT, requests=50, plan=None, gain=gain)


class Story:
    """A guard that is told of one event after the other, with the placement that runs."""

    def __init__(self, rules: ApplyRules = RULES) -> None:
        self.guard, self.present, self.now = ApplyGuard(rules), "2P1D", 0.0

    def tell(self, events: str) -> list[str]:
        """Events by name with what they are given, such as "offer 1P2D, look, fail, wait 100"; what is decided."""
        return [self.tell_one(*each.split()) for each in events.split(",") if each]

    def tell_one(self, event: str, *given: str) -> str:
        found: str | None = getattr(self, event)(*given)
        return found or ""

    def offer(self, placement: str = "1P2D", instead_of: str = "2P1D", gain: str = "2") -> str:
        return said(self.guard.offer(proposal(placement, instead_of, float(gain)), self.now))

    def look(self, *obstacle: str) -> str:
        return said(self.guard.look(self.now, self.present, " ".join(obstacle)))

    def succeed(self) -> str:
        applying = self.guard.applying
        assert applying is not None
        self.present = applying.placement
        return said(self.guard.succeed(self.now))

    def refuse(self) -> str:
        return said(self.guard.refuse(self.now, "E1 is away"))

    def fail(self) -> str:
        return said(self.guard.fail(self.now, "no memory"))

    def wait(self, seconds: str | float) -> None:
        self.now += float(seconds)

    def run(self, placement: str) -> None:
        """Somebody else has changed what runs."""
        self.present = placement


def said(decision: ApplyDecision | None) -> str:
    return decision.verdict if decision is not None else ""


APPLIED = "offer, look, succeed"
FAILED_TWICE = "offer, look, fail, wait 100, look, offer, look, fail"
# what came before | the event | what is decided, in which words | what there is afterwards: one that waits, is applied
TABLE = [
    ("", "look", "", "", ""),
    ("", "offer", "", "", "waiting"),
    ("", "offer 1P2D 2P1D 1.19", "dropped", "gains 1.19, less than 1.2", ""),
    ("", "offer 1P2D 2P1D 1.2", "", "", "waiting"),
    ("", "offer 1P2D 2P1D inf", "", "", "waiting"),
    ("offer 1PD", "offer", "", "", "waiting"),
    ("offer", "look", "applies", "gains 2.00", "applying"),
    ("offer", "look E1 is away", "held back", "E1 is away", "waiting"),
    ("offer, look E1", "look E1", "", "", "waiting"),
    ("offer, look E1", "look", "applies", "", "applying"),
    ("offer, look E1, wait 30", "look", "applies", "", "applying"),
    ("offer, look E1, wait 31", "look", "planned again", "waited for 31 s", ""),
    ("offer, look E1, wait 31", "look E1", "", "", "waiting"),
    ("offer, run 3PD", "look", "planned again", "3PD runs by now", ""),
    ("offer, run 3PD", "look E1", "held back", "E1", "waiting"),
    ("offer, run 2D1P", "look", "dropped", "runs already", ""),
    ("offer, run 1D2P", "look", "applies", "", "applying"),
    ("offer, look, offer 1PD", "look", "held back", "1P2D is being applied", "both"),
    ("offer, look, offer", "look", "held back", "1P2D is being applied", "both"),
    ("offer, look, offer, succeed", "look", "dropped", "runs already", ""),
    ("offer, look", "succeed", "applied", "runs now", ""),
    (f"{APPLIED}, wait 99, offer 1PD 1P2D", "look", "held back", "1 s of the cool-down", "waiting"),
    (f"{APPLIED}, wait 100, offer 1PD 1P2D", "look", "applies", "", "applying"),
    ("offer, look", "refuse", "held back", "E1 is away", "waiting"),
    ("offer, look, refuse, wait 4.9", "look", "", "", "waiting"),
    ("offer, look, refuse, wait 5", "look", "applies", "", "applying"),
    ("offer, look, refuse, wait 31", "look", "planned again", "waited for 31 s", ""),
    ("offer, look, offer 1PD", "refuse", "dropped", "newer", "waiting"),
    ("offer, look", "fail", "failed", "no memory", "waiting"),
    ("offer, look, offer 1PD", "fail", "failed", "no memory", "waiting"),
    ("offer, look, fail, wait 99", "look", "", "", "waiting"),
    ("offer, look, fail, wait 100", "look", "planned again", "waited for 100 s", ""),
    (f"{FAILED_TWICE}, wait 100", "look", "dropped", "failed 2 times", ""),
    (f"{FAILED_TWICE}, wait 100, offer 1PD", "look", "applies", "", "applying"),
    (f"{FAILED_TWICE}, wait 3600, offer", "look", "applies", "", "applying"),
]


@pytest.mark.parametrize(("before", "event", "verdict", "words", "left"), TABLE)
def test_the_table(before: str, event: str, verdict: str, words: str, left: str) -> None:
    story = Story()
    story.tell(before)
    assert story.tell(event) == [verdict]
    if verdict:
        made = story.guard.decisions[-1]
        assert (made.verdict, made.at_s) == (verdict, story.now)
        assert words in made.because
        assert str(made) == f"{made.proposal.placement} instead of {made.proposal.instead_of} {verdict}: {made.because}"
    assert (story.guard.waiting is not None) == (left in ("waiting", "both"))
    assert (story.guard.applying is not None) == (left in ("applying", "both"))


def test_what_a_newer_one_replaces_is_told() -> None:
    story = Story()
    story.offer("1PD")
    story.offer("1P2D")
    (dropped,) = story.guard.decisions
    assert (dropped.verdict, dropped.proposal.placement, dropped.because) == ("dropped", "1PD", "a newer proposal came")
    assert story.guard.waiting is not None
    assert story.guard.waiting.placement == "1P2D"


def test_no_more_than_so_many_an_hour() -> None:
    story = Story(ApplyRules(cooldown_s=0, most_per_hour=2, fresh_s=HOUR_S))
    assert story.tell(f"{APPLIED}, wait 600, offer 1PD 1P2D, look, fail, wait 1, offer 1E1PD 1P2D, look") == [
        *("", "applies", "applied", "", "", "applies", "failed", "", "", "held back")
    ]
    assert "2 applies have begun within an hour" in story.guard.decisions[-1].because
    story.wait(HOUR_S - 602)
    assert story.look() == ""
    story.wait(1)
    assert story.look() == "applies"


def test_what_was_refused_is_no_apply_of_the_hour() -> None:
    story = Story(ApplyRules(cooldown_s=0, most_per_hour=1, retry_s=1))
    story.offer()
    for _ in range(5):
        assert (story.look(), story.refuse()) == ("applies", "held back")
        story.wait(1)
    assert (story.look(), story.succeed()) == ("applies", "applied")


def test_answers_without_an_apply_are_errors() -> None:
    guard = ApplyGuard()
    for answer in (lambda: guard.succeed(0), lambda: guard.refuse(0, ""), lambda: guard.fail(0, "")):
        with pytest.raises(ConfigError, match="nothing is being applied"):
            answer()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"least_gain": 0.99}, "least_gain must be at least 1"),
        ({"least_gain": math.nan}, "least_gain"),
        ({"cooldown_s": -1}, "cooldown_s is a number of at least 0"),
        ({"cooldown_s": math.inf}, "cooldown_s"),
        ({"most_per_hour": 0}, "most_per_hour is a whole number of at least 1"),
        ({"most_per_hour": 1.5}, "most_per_hour"),
        ({"fresh_s": 0}, "fresh_s is a number above 0"),
        ({"retry_s": 0}, "retry_s is a number above 0"),
        ({"tries": 0}, "tries is a whole number of at least 1"),
    ],
)
def test_rules_out_of_range_are_refused(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ApplyRules(**rules)


def test_placements_are_the_same_in_whatever_order() -> None:
    assert has_same_roles("1PD2E", "2E1PD")
    assert has_same_roles("1E1PD1E", "2E1PD")
    assert not has_same_roles("2E1PD", "1E2PD")
    assert not has_same_roles("2EPD", "1E1PD")


# ---------------------------------------------------------------- promises, in random orders


class Chance:
    """Random events of a guard, and a ledger of its own of what it may do."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.rules = ApplyRules(
            least_gain=draw.choice([1.0, 1.1, 1.5]),
            cooldown_s=draw.choice([0, 30, 600]),
            most_per_hour=draw.choice([1, 2, 5]),
            fresh_s=draw.choice([1, 60, 900]),
            retry_s=draw.choice([1, 20]),
            tries=draw.choice([1, 2, 3]),
        )
        self.story = Story(self.rules)
        self.offered_at: dict[int, float] = {}
        self.begun: list[tuple[float, str]] = []
        self.failures: list[tuple[float, str]] = []
        self.ended_at = self.refused_at = -math.inf
        self.offered: list[Proposal] = []

    def run(self, events: int) -> None:
        for _ in range(events):
            self.story.wait(self.draw.choice([0, 0.5, 1, 7, 60, 400]))
            if self.draw.random() < 0.1:
                self.story.present = self.draw.choice(["2P1D", "1P2D", "3PD"])
            self.draw.choice([self.offer, self.look, self.look, self.answer])()
            self.check_promises()

    def offer(self) -> None:
        gain = self.draw.choice([1.0, 1.05, 1.2, 3.0, math.inf])
        made = proposal(self.draw.choice(["1P2D", "3PD", "2P1D"]), self.draw.choice(["2P1D", "1P2D"]), gain)
        self.offered.append(made)
        self.offered_at[id(made)] = self.story.now
        self.story.guard.offer(made, self.story.now)

    def look(self) -> None:
        obstacle = self.draw.choice(["", "", "", "E1 is away"])
        decision = self.story.guard.look(self.story.now, self.story.present, obstacle)
        if decision is not None and decision.verdict == "applies":
            self.check_apply(decision.proposal, obstacle)

    def check_apply(self, made: Proposal, obstacle: str) -> None:
        now, rules = self.story.now, self.rules
        assert not obstacle
        assert made.gain >= rules.least_gain
        assert has_same_roles(made.instead_of, self.story.present)
        assert now >= self.ended_at + rules.cooldown_s
        assert now >= self.refused_at + rules.retry_s
        assert now - self.offered_at[id(made)] <= rules.fresh_s
        assert sum(now - at < HOUR_S for at, _ in self.begun) < rules.most_per_hour
        assert sum(now - at < HOUR_S and each == made.placement for at, each in self.failures) < rules.tries
        self.begun.append((now, made.placement))

    def answer(self) -> None:
        applying = self.story.guard.applying
        if applying is None:
            return
        how = self.draw.choice(["succeed", "succeed", "refuse", "fail"])
        getattr(self.story, how)()
        if how == "refuse":
            self.begun.pop()
            self.refused_at = self.story.now
            return
        self.ended_at = self.story.now
        if how == "fail":
            self.failures.append((self.story.now, applying.placement))

    def check_promises(self) -> None:
        """No proposal is lost, and none is kept once it has ended: what was said last of each tells."""
        guard = self.story.guard
        last = {id(each.proposal): each.verdict for each in guard.decisions}
        for made in self.offered:
            if made is guard.waiting:
                assert last.get(id(made), "held back") in ("held back", "failed")
            elif made is guard.applying:
                assert last[id(made)] == "applies"
            else:
                assert last[id(made)] in ("applied", "dropped", "planned again", "failed")


@pytest.mark.parametrize("seed", range(60))
def test_promises_hold_in_any_order(seed: int) -> None:
    Chance(seed).run(60)


@pytest.mark.parametrize("seed", range(12))
def test_left_in_peace_a_proposal_ends_within_the_hour(seed: int) -> None:
    chance = Chance(seed)
    chance.run(40)
    story = chance.story
    while story.guard.applying is not None:
        story.succeed()
    story.offer("1P2D" if story.present != "1P2D" else "2P1D", story.present, "10")
    until = story.now + HOUR_S + chance.rules.cooldown_s
    while story.now <= until and story.look() not in ("applies", "planned again", "dropped"):
        story.wait(20)
    assert story.now <= until
