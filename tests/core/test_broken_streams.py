"""Prompts that stream to where they decode, in virtual time: what has come outlives the instance that prefilled it.

``streaming_cluster(seed, POLICY).run()`` repeats a run. Each block that can be matched is compared with what its key
says as it is published (``support.virtual.prefix_rules``), however its transfer broke off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from support.reader_checks import check_readers
from support.streaming_clusters import streaming_cluster, strike_streams
from support.thinned import thinned
from support.virtual.cluster import VirtualCluster
from support.virtual.prefix_rules import FetchRules, Matchable
from trinity.core.failure_policy import FailurePolicy
from trinity.core.instance import admission
from trinity.core.instance.peer_questions import PrefixFetches
from trinity.core.instance.request_state import Piece, PullProgress, RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Fetched, Release, Send
from trinity.core.migration import kv_target, prefix_fetch

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 60
ENOUGH = 400


def run(seed: int, limit: int = 500_000) -> VirtualCluster:
    cluster = streaming_cluster(seed, POLICY)
    try:
        strike_streams(cluster, seed).run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"streaming_cluster({seed})")
        raise
    return cluster


def run_all(count: int, first: int = 0) -> list[VirtualCluster]:
    return [run(seed) for seed in (first, *range(1, count))]


def test_requests_are_whole_and_blocks_what_their_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    keep = kv_target.keep_whole_blocks

    def count(s: State, state: RequestState) -> None:
        before = state.published_blocks
        keep(s, state)
        seen["kept"] += state.published_blocks > before

    monkeypatch.setattr(kv_target, "keep_whole_blocks", count)
    for cluster in run_all(AT_ALL):
        seen["fetched"] += sum(each.pulled for each in cluster.observers if isinstance(each, FetchRules))
        seen.update(each.end.reason for each in cluster.outcomes.values() if each.end)
        seen["survived"] += sum(bool(each.end and each.end.former) for each in cluster.outcomes.values())
        seen["compared"] += sum(each.compared for each in cluster.observers if isinstance(each, Matchable))
    assert min(seen["kept"], seen["survived"], seen["fetched"], seen["length"]) > AT_ALL // 10, seen
    assert seen["compared"] > 10 * AT_ALL, seen


# ---------------------------------------------------------------- a rule not kept is noticed


def unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks count that their step may write again."""
    plain = PullProgress.count_whole

    def count_whole(self: PullProgress) -> int:
        self.final = self.blocks
        return plain(self)

    monkeypatch.setattr(PullProgress, "count_whole", count_whole)


def layerless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks count of which a layer has come."""

    def count_whole(self: PullProgress) -> int:
        final = max(self.cached, self.final)
        return next((block for block in range(self.cached, final) if not self._here[block]), final)

    monkeypatch.setattr(PullProgress, "count_whole", count_whole)


def unvoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step has begun anew still counts as here."""
    plain = PullProgress.invalidate

    def invalidate(self: PullProgress, blocks: tuple[int, int]) -> None:
        before = list(self._here)
        plain(self, blocks)
        self._here = before

    monkeypatch.setattr(PullProgress, "invalidate", invalidate)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull counts as it begins."""
    plain = kv_target._pull

    def pull(s: State, state: RequestState, incoming: object, piece: Piece, now: float) -> None:
        plain(s, state, incoming, piece, now)  # type: ignore[arg-type]
        missing = state.incoming.progress.missing  # type: ignore[union-attr]
        state.incoming.progress.note_arrival(piece)  # type: ignore[union-attr]
        state.incoming.progress.missing = missing  # type: ignore[union-attr]

    monkeypatch.setattr(kv_target, "_pull", pull)


def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pull that failed has brought is published."""
    plain = prefix_fetch.take_pulled
    monkeypatch.setattr(prefix_fetch, "take_pulled", lambda s, event: plain(s, replace(event, failure=None)))


def grasping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for an answer holds what it has of the text meanwhile."""
    plain = prefix_fetch.begin_fetch

    def begin_fetch(s: State, state: RequestState, now: float) -> bool:
        before, covered = set(s.prefix_fetches), plain(s, state, now)
        for id in set(s.prefix_fetches) - before:
            if s.kv.fits(1):
                s.prefix_fetches[id].ahead = s.allocate("kv", 1)
        return covered

    monkeypatch.setattr(admission, "begin_fetch", begin_fetch)


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill waits for no fetch of its text."""
    monkeypatch.setattr(PrefixFetches, "delay", lambda self, state: False)


def owing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is leased and not pulled is not given back."""
    plain = prefix_fetch.take_fetched

    def take_fetched(s: State, event: Fetched, now: float) -> bool:
        before = len(s.out)
        taken = plain(s, event, now)
        mine = [each for each in s.out[before:] if isinstance(each, Send) and isinstance(each.message, Release)]
        s.out[before:] = [each for each in s.out[before:] if each not in mine or not taken]
        return taken

    monkeypatch.setattr(prefix_fetch, "take_fetched", take_fetched)


RULES: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    unfinished: "is not what its key says, if its step begins anew",
    layerless: "is not what its key says",
    unvoided: "is not what its key says",
    impatient: "is not what its key says|is written and matchable",
    careless: r"is not what its key says|the KV of .* is wrong",
    grasping: "holds blocks for",
    hurried: "which a fetch may bring",
    owing: "no Release of",
}


# The run that noticed it when this was written, which is played first.
SEEN: dict[Callable[[pytest.MonkeyPatch], None], int] = {careless: 77, owing: 229}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", thinned(RULES, lambda rule: rule not in SEEN), ids=lambda rule: rule.__name__)
def test_a_rule_not_kept_is_noticed(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises(AssertionError, match=RULES[rule]):
        run_all(ENOUGH, SEEN.get(rule, 0))
