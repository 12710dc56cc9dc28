"""What screening loses: two of the twenty cases in every run of the tests, all of them in the slow ones."""

from __future__ import annotations

import pytest

from benchmarks.planning import screening
from benchmarks.planning.screening import Lost, lost, question, summary
from trinity.simulation import compiled_engine
from trinity.simulation.screening_table import MOST_LOST

pytestmark = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no screening engine: {compiled_engine.why_unavailable()}"
)
EARNED = ("routing=least_loaded", "routing=prefix_hits", "kv=layer", "kv=grouped")


def test_a_question_is_the_same_every_time_and_half_of_them_have_contents_that_repeat() -> None:
    assert list(question(3).trace) == list(question(3).trace)
    assert any(row.hash_ids for row in question(3).trace)
    assert not any(row.hash_ids for row in question(4).trace)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "setting"), [(8, "kv=grouped"), pytest.param(18, "routing=least_loaded", marks=pytest.mark.slow)]
)
def test_screening_and_replays_lose_little(number: int, setting: str) -> None:
    assert lost(question(number), setting).share <= MOST_LOST


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", EARNED)
def test_every_stand_in_is_earned(setting: str) -> None:
    known = screening.measure(setting, screening.CASES)
    assert max(each.share for each in known) <= MOST_LOST, summary(setting, known)


def test_a_summary_has_the_worst_case() -> None:
    fields = {"number": 1, "chosen": "EPD", "best": "EPD", "gap": 0.1, "core_runs": 3, "cpu_s": 1.0}
    said = summary("x", [Lost(reached=9.0, possible=10.0, **fields), Lost(reached=10.0, possible=10.0, **fields)])  # type: ignore[arg-type]
    assert said.startswith("x: lost at most 10.0%, 5.00% on average, anything in 1 of 2 cases")
