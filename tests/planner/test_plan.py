"""A plan says what to run and why, in words, as a table, as a file and as plain values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from support.plans import BEST, LOWER, PAPER, plan
from trinity.errors import ConfigError
from trinity.placement import Placement
from trinity.planner.plan import SHOWN, Candidate, Plan


def test_it_names_what_to_run_the_strategy_and_algorithm_2s_own_choice() -> None:
    said = plan().explain()
    assert said.startswith("Run 2EP2D (EP+D) for llava-1.5-7b on 4 x H100: 12.5 requests/s by the rule 'guard'.")
    assert "first token within 1 s, 0.05 s between tokens" in said
    assert "4 requests, 50% of them with images" in said
    assert "1.25 times Algorithm 2's own choice, 1E1P2D (10 requests/s)" in said
    assert "Strategy 'race': 17 replays over 3 candidates." in said
    assert "1 were not searched to the end" in said


def test_it_says_what_limits_the_best_one_and_how_busy_that_is() -> None:
    said = plan().explain()
    assert "decode (D), 85% busy" in said  # the mean of D0 and D1
    assert "KV cache was 75% held" in said
    assert "image cache was 5% held" in said


def test_a_bottleneck_shared_with_another_stage_counts_all_the_work_of_its_instances() -> None:
    busy = msgspec.structs.replace(BEST, bottleneck="P")
    assert "prefill (P), 55% busy" in plan(best=busy).explain()  # (0.1 + 0.5 + 0.1 + 0.4) / 2


def test_it_says_how_sure_it_is() -> None:
    assert "seeds 1, 2, 3) its goodput is 12 to 13.1 requests/s" in plan().explain()
    assert "redrawn" not in plan(best=msgspec.structs.replace(BEST, spread=())).explain()


def test_where_algorithm_2_chose_the_same_it_says_so() -> None:
    assert "It is Algorithm 2's own choice too." in plan(paper=BEST, candidates=(BEST, LOWER)).explain()


def test_an_slo_that_nothing_meets_is_said_with_the_best_attainment() -> None:
    nothing = msgspec.structs.replace(BEST, score=0.0, goodput=dict.fromkeys(BEST.goodput, 0.0), spread=())
    said = plan(met=False, best=nothing, candidates=(nothing,)).explain()
    assert said.startswith("No candidate for llava-1.5-7b on 4 x H100 meets the SLO at any rate")
    assert "the best attainment is 99.0%, of 2EP2D" in said
    assert "times" not in said


def test_notes_are_said_and_shown() -> None:
    noted = plan(notes=("the trace was drawn again",))
    assert "the trace was drawn again" in noted.explain()
    assert "note: the trace was drawn again" in str(noted)
    assert "the trace was drawn again" in noted._repr_html_()


def test_the_objectives_have_units() -> None:
    per_cost = plan(objective="goodput_per_cost", slo=None)
    assert "12.5 requests per unit of price." in per_cost.explain()
    assert "SLO" not in per_cost.explain()


def test_its_table_has_each_candidate_best_first_with_every_rule() -> None:
    lines = str(plan()).splitlines()
    assert lines[1].split() == ["method", "score", "p90", "p99", "guard", "tpot", "bound", "limited", "by"]
    assert [line.split()[0] for line in lines[2:]] == ["2EP2D", "1E1P2D", "4EPD"]
    assert "(Algorithm 2)" in lines[3]
    assert "lower" in lines[4]
    assert "12.5" in lines[4]  # its bound


def test_mixed_devices_say_which_roles_run_on_which() -> None:
    mixed = msgspec.structs.replace(BEST, devices=("H100", "H100", "H100", "L40S"))
    other = msgspec.structs.replace(BEST, devices=("L40S", "H100", "H100", "H100"))
    made = plan(best=mixed, candidates=(mixed, other), paper=other)
    said = str(made).splitlines()
    assert "on 3 x H100 + 1 x L40S (2EP: H100, 1D: H100, 1D: L40S)" in said[0]
    assert [line for line in said if "Algorithm 2" in line] == [said[3]]  # the same placement on other devices
    assert "2EP2D (1EP: L40S, 1EP: H100, 2D: H100) (Algorithm 2)" in said[3]
    assert "1.00 times Algorithm 2's own choice" in made.explain()


def test_a_long_list_is_cut_but_never_hides_algorithm_2() -> None:
    many = tuple(msgspec.structs.replace(LOWER, placement=f"{n}EPD") for n in range(1, SHOWN + 9))
    said = str(plan(candidates=(BEST, *many, PAPER)))
    assert "1E1P2D (Algorithm 2)" in said
    assert "10 more candidates: plan.candidates" in said


def test_html_is_escaped() -> None:
    assert "&lt;b&gt;" in plan(model="<b>")._repr_html_()
    assert "<b>" not in plan(model="<b>", notes=("<b>",))._repr_html_()


def test_settings_of_a_wider_search_are_shown() -> None:
    tuned = msgspec.structs.replace(BEST, settings={"order": "sjf", "tokens": 512})
    made = plan(best=tuned, candidates=(tuned, BEST))
    assert "2EP2D order=sjf tokens=512" in str(made)
    assert next(made.rows())["set_tokens"] == 512
    assert "1.00 times the next best" in made.explain()  # the same placement without the settings is another candidate


def test_saved_and_loaded_it_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    assert Plan.load(path) == plan()
    assert json.loads(path.read_text())["best"]["placement"] == "2EP2D"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b'{"model": 3}', b"\xff\xfe"])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"holds no plan of trinity.*plan\.save"):
        Plan.load(tmp_path / "bad.json")


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        Plan.load(tmp_path / "none.json")


def test_plain_values() -> None:
    plain = plan().to_dict()
    assert plain["candidates"][1]["goodput"] == {"guard": 10.0}
    assert json.loads(json.dumps(plain)) == plain
    rows = list(plan().rows())
    assert [row["rank"] for row in rows] == [1, 2, 3]
    assert rows[0]["goodput_p99"] == 9.0
    assert rows[2]["goodput_p99"] is None
    assert rows[0]["devices"] == "4 x H100"


def test_pandas_gets_one_row_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("pandas")
    fake.DataFrame = list  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert plan().to_pandas() == list(plan().rows())


def test_without_pandas_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        plan().to_pandas()


def test_what_to_run_is_a_placement() -> None:
    assert Placement.parse(plan().placement).size == BEST.instances == 4
    assert BEST.best_attainment("guard") == 0.99
    assert Candidate(placement="EPD", method="EPD").best_attainment("guard") is None
