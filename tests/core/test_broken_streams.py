"""Prompts that stream to where they decode, in virtual time: what has come outlives the instance that prefilled it.

``streaming_cluster(seed, POLICY).run()`` repeats a run. Each block that can be matched is compared with what its key
says as it is published (``trinity.testing.matchable``), however its transfer broke off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from support.reader_checks import check_readers
from support.streaming_clusters import streaming_cluster, strike_prefills
from trinity.core.failure_policy import FailurePolicy
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.migration import kv_target, lost_transfers
from trinity.core.migration.pull_progress import Piece, PullProgress
from trinity.testing.matchable import Matchable
from trinity.testing.virtual import VirtualCluster

POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
AT_ALL = 60
ENOUGH = 400


def run(seed: int, limit: int = 500_000) -> VirtualCluster:
    cluster = streaming_cluster(seed, POLICY)
    try:
        strike_prefills(cluster, seed).run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"streaming_cluster({seed})")
        raise
    return cluster


def run_all(count: int) -> list[VirtualCluster]:
    return [run(seed) for seed in range(count)]


def test_requests_are_whole_and_blocks_what_their_keys_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    keep = lost_transfers.keep_whole_blocks

    def count(s: State, state: RequestState) -> None:
        before = state.published_blocks
        keep(s, state)
        seen["kept"] += state.published_blocks > before

    monkeypatch.setattr(lost_transfers, "keep_whole_blocks", count)
    for cluster in run_all(AT_ALL):
        seen.update(each.end.reason for each in cluster.outcomes.values() if each.end)
        seen["survived"] += sum(bool(each.end and each.end.former) for each in cluster.outcomes.values())
        seen["compared"] += sum(each.compared for each in cluster.observers if isinstance(each, Matchable))
    assert min(seen["kept"], seen["survived"], seen["length"]) > AT_ALL // 10, seen
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


RULES: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (unfinished, layerless, unvoided, impatient)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_not_kept_is_noticed(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises(AssertionError, match=r"is not what its key says|is written and matchable"):
        run_all(ENOUGH)
