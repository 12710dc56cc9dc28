"""Runs in virtual time to which all happens at once that can happen, each checked after every event.

``play(together(seed))`` repeats a run; ``make virtual`` plays 20,000. Each rule of the other files, not kept, is tried
here too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from core import test_moves_by_other_rules, test_poison_runs, test_recovery_runs, test_spread_runs
from core.frontend import test_storms
from support.together import play, together
from sweeps import virtual_runs
from trinity.core.frontend import FrontendCore
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.instance.settings import Settings
from trinity.core.messages import Tick, Value

AT_ALL = 80
HAPPENS = (
    *("deaths", "survived", "halted", "switched", "moved", "refused", "lost", "moving", "late", "poison refused"),
    *("length", "stop", "cancelled", "encoded", "StageError", "MigrationError", "Overloaded", "DeadlineExceeded"),
)


@pytest.mark.timeout(900)
def test_all_at_once_with_all_invariants() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        seen += play(together(seed))
    missing = [what for what in HAPPENS if not seen[what]]
    assert not missing, f"{missing} never happened: {seen}"
    assert sum(count for what, count in seen.items() if what.startswith("amid ")) > AT_ALL // 10, seen
    assert seen["innocent refused"] <= seen["requests"] // 100, seen


def test_a_run_is_the_same_again() -> None:
    one, other = (together(7) for _ in range(2))
    assert play(one) == play(other)
    assert [each[:2] for each in one.cluster.commands] == [each[:2] for each in other.cluster.commands]


def test_runs_are_gentle_or_not_and_each_kind_has_each_policy() -> None:
    kinds = Counter((run.gentle, run.policy.retry_share < 1e-3) for run in map(together, range(60)))
    assert len(kinds) == 4
    assert min(kinds.values()) > 5


def test_the_sweep_tells_which_run_was_stopped_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, stopped = virtual_runs.play_some(range(3))
    assert seen["requests"]
    assert not stopped

    def play_but_one(run: Any) -> Counter[str]:
        if run.seed == 1:
            raise AssertionError("a  check")
        return play(run)

    monkeypatch.setattr(virtual_runs, "play", play_but_one)
    assert virtual_runs.play_some(range(3))[1] == ["seed 1: AssertionError: a check"]
    monkeypatch.setattr(virtual_runs, "play_all", lambda first, runs, processes: (seen, ["seed 1"] * (runs == 5)))
    assert virtual_runs.main(["--runs", "4"]) == 0
    assert virtual_runs.main(["--runs", "5"]) == 1
    assert re.search(r"\d requests\n", capsys.readouterr().out)


# ---------------------------------------------------------------- runs that found something


FOUND = {
    3488: "who was to run alone waited for ever for an instance that was not reserved for it",
    5317: "who was to run alone, and could be held by no prefill any more, waited for ever for an encoder",
    2940: "a channel that was cut twice lost a message and not those behind it, in this world alone",
    18_907: "one that ran alone no more took its turn ahead of an older one that had waited for its place",
    10_733: "one that waited for a turn and was to run alone was sent a second time as its turn came",
    6561: "the check took the present attempt of a request for one that an instance had been told to forget",
    601_272: "the check took a block that decodes had filled for what had been pulled to it for another request",
    612_311: "a move was asked for while no instance decoded: this world alone could not draw a place for it",
    1108: "one whose pause was over at the same moment as an older one's went ahead of it",
}


@pytest.mark.parametrize("seed", FOUND, ids=str)
def test_a_run_that_found_something(seed: int) -> None:
    play(together(seed))


# ---------------------------------------------------------------- a rule not kept is noticed


def taking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life takes in what was meant for a former one."""
    monkeypatch.setattr(Settings, "is_other_life", lambda self, epoch: False)


def unsorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those whose time has come at once, whoever is first by its name goes first."""

    def expire(self: FrontendCore, event: Tick, now: float) -> list[Value]:
        out: list[Value] = []
        while (request := self._alarms.pop(now)) is not None:
            if self.entries[request].deadline <= now:
                out += plain(self, event, now)
            else:
                out += self._try_again(self.entries[request], now)
        return out

    plain = FrontendCore._expire
    monkeypatch.setattr(FrontendCore, "_expire", expire)


def delivered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is out is out again."""
    emitted = FrontendCore._emitted

    def again(self: FrontendCore, entry: FrontendRequest, *rest: Any) -> list[Value]:
        out = emitted(self, entry, *rest)
        if entry.delivered > 2 and entry.former:
            entry.delivered -= 1
        return out

    monkeypatch.setattr(FrontendCore, "_emitted", again)


Broken = Callable[[pytest.MonkeyPatch], None]
RECOVERY = (
    *(test_recovery_runs.nameless, test_recovery_runs.unforgotten, test_recovery_runs.unanswered),
    *(test_recovery_runs.unsaid, test_recovery_runs.blank, test_recovery_runs.mixed, test_recovery_runs.deaf),
)
SPREAD = (
    *(test_spread_runs.polite, test_spread_runs.silent, test_spread_runs.faithful, test_spread_runs.hasty),
    test_spread_runs.holding_on,
)
TURNS = (test_storms.unbounded, test_storms.kept, test_storms.unawakened, test_storms.overtaking, test_storms.youngest)
OWN: dict[Broken, int] = {unsorted: 1100, delivered_twice: 0}  # and the seed from which on it is noticed soon
OTHERS: tuple[Broken, ...] = (
    *(taking, *RECOVERY, *SPREAD, *TURNS),
    *(*test_poison_runs.RULES, *test_moves_by_other_rules.BROKEN),
)


def is_noticed(broken: Broken, patch: pytest.MonkeyPatch, seeds: range) -> bool:
    broken(patch)
    for seed in seeds:
        try:
            play(together(seed), limit=30_000)
        except (AssertionError, KeyError, ValueError, RecursionError, AttributeError):
            return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize("broken", OWN, ids=lambda each: each.__name__)
def test_a_rule_that_is_not_kept_is_noticed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_noticed(broken, monkeypatch, range(OWN[broken], OWN[broken] + 100)), broken.__doc__


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("broken", OTHERS, ids=lambda each: f"{each.__module__}-{each.__name__}")
def test_rules_that_others_notice_are_noticed_here_too(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_noticed(broken, monkeypatch, range(20_000)), broken.__doc__
