"""A planner and a simulator take a checkpoint's folder and the file of measured tables, as a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trinity import SLO, HybridPlanner, SearchConfig, Trace
from trinity.costs.cluster import Cluster
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import CostTables
from trinity.errors import ConfigError, UnknownName
from trinity.simulation.simulator import Simulator
from trinity.testing.checkpoints import build_checkpoint

SECONDS = {"decodes": {1: 0.01, 64: 0.02}, "prefill": {1: 0.01, 1024: 0.1}, "media": {576: 0.1}}
TABLES = CostTables.from_samples({1: SECONDS}, model="llava", device="a server's cores", dtype="bfloat16")
RELAXED = SLO(2.0, 0.1)


def planner(model: Any, slo: SLO = RELAXED, **options: Any) -> HybridPlanner:
    return HybridPlanner(model, slo, instances=2, search=SearchConfig(seeds=0), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("llava", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoints_folder_is_a_model(folder: Path, kind: type) -> None:
    """At 6aebd56: unknown model, where ``Pipeline`` takes the same path."""
    shape = read_model_shape(folder)
    assert planner(kind(folder)).model.language == shape.language
    assert planner(kind(folder / "config.json")).model.kv_bytes == shape.kv_bytes
    assert Simulator(kind(folder), RELAXED, cluster=Cluster.of("H100", 2)).model.vision == shape.vision


def test_a_known_name_goes_before_a_folder_of_that_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llava-1.5-7b").symlink_to(folder)
    assert planner("llava-1.5-7b").model.language.layers == 32
    assert planner("./llava-1.5-7b").model.language == read_model_shape(folder).language


@pytest.mark.parametrize("name", ["no/such/folder", "llava-2", "x" * 5000, "a\0b"])
def test_what_is_neither_says_what_would_be_one(name: str) -> None:
    with pytest.raises(UnknownName, match=r"known: internvl2-8b, .* give the folder of its checkpoint"):
        planner(name)


def test_a_hub_id_that_is_nowhere_says_how_to_fetch_it() -> None:
    with pytest.raises(ConfigError, match="hf download nobody/no-such-model"):
        planner("nobody/no-such-model")


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        planner(tmp_path)


@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_of_measured_tables_is_a_cost(tmp_path: Path, kind: type) -> None:
    """At 6aebd56 a text was taken for a cost model, and plan() failed with an AttributeError; later it was refused."""
    TABLES.save(tmp_path / "tables.json")
    path = kind(tmp_path / "tables.json")
    made = planner("llava-1.5-7b", cost=path)
    assert made.hardware.kinds["H100"].cost == TABLES
    assert made.hardware.labels["H100"] == "a server's cores"
    assert planner("llava-1.5-7b", cost={"H100": path}).hardware.kinds["H100"].cost == TABLES
    assert Simulator("llava-1.5-7b", RELAXED, cluster=Cluster.of("H100", 2), cost=path).cost_of(0) == TABLES


@pytest.mark.parametrize("written", [None, "{}", "no tables"])
def test_a_file_without_tables_is_named(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "tables.json").write_text(written)
    with pytest.raises(ConfigError, match=r"tables\.json"):
        planner("llava-1.5-7b", cost=tmp_path / "tables.json")


# ---------------------------------------------------------------- a plan that nothing meets


def texts(tokens: int, count: int = 300) -> Trace:
    return Trace({"timestamp": 200.0 * n, "input_length": tokens, "output_length": 10} for n in range(count))


def test_a_plan_that_fails_names_rows_beyond_the_context_and_no_stage() -> None:
    """At 6aebd56 it began with a stage that limits it, "0% busy", and a cache, "0% held"."""
    mixed = Trace([*texts(100, 225), *texts(5000, 75)])
    lines = planner("llava-1.5-7b", cost=TABLES).plan(mixed).explain().splitlines()
    assert lines[0].startswith("No candidate for llava-1.5-7b on 2 x a server's cores meets the SLO")
    assert lines[1].startswith("75 of 300 requests (25.0%) can never be served")
    assert not any("busy" in line or "held" in line or "limits it" in line for line in lines)


def test_a_plan_that_fails_names_the_steps_that_are_longer_than_the_slo() -> None:
    plan = planner("llava-1.5-7b", SLO(1.0, 0.005), cost=TABLES).plan(texts(100))
    said = [line for line in plan.explain().splitlines() if "limits it" in line]
    assert said == ["What limits it: a server's cores needs 14.9 ms for a decode of 32 requests, and the SLO is 5 ms."]
    assert "P" not in str(plan).splitlines()[2].split()[2:], "no stage is said to limit a candidate"
