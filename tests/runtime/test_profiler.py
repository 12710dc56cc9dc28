"""Budgets by profiling: found on the running stages, feasible, cached on disk, and used by the scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.checkpoint_files import checkpoint
from support.lazy_cuda import replace_cuda
from trinity.core.messages import KV, Open, Sampled, Step
from trinity.core.scheduler import TBT_SHARE, TTFT_SHARE, BatchRules
from trinity.costs.budgets import MAX_DECODE_ROWS, BudgetCache, StepBudgets
from trinity.errors import TrinityWarning
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime import loader
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances
from trinity.runtime.profiler import Probe, profile_budgets
from trinity.stages.language import LanguageStage
from trinity.traces.trace import SLO


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"))
    yield made
    made.close()


def deployment(slo: SLO | None = None, budgets: StepBudgets | None = None) -> ServingConfig:
    return ServingConfig(
        model=checkpoint("llava"),
        dtype="float32",
        slo=slo,
        budgets=budgets,
        rules=BatchRules(),
        cache=CacheConfig(image_block_size=64, kv_block_size=16, pools={"image": 8, "kv": 16}),
        observe=None,
    )


def loaded(roles: str, processor: RequestProcessor) -> LoadedInstance:
    return load_instances(deployment(), name_instances([Instance(roles)]), processor)[0]


@pytest.mark.parametrize("roles", ["E", "P", "D", "EP", "ED", "PD", "EPD"])
def test_budgets_of_every_role(roles: str, processor: RequestProcessor, tmp_path: Path) -> None:
    instance = loaded(roles, processor)
    found = profile_budgets(instance, processor, 5.0, BudgetCache(tmp_path))
    assert found.feasible
    assert found.limit_s == 5.0
    assert found.cost is not None
    assert bool(found.cost.media) == ("E" in roles)
    assert bool(found.cost.prefill) == ("P" in roles)
    assert bool(found.cost.decodes) == ("D" in roles)
    image_tokens = Probe(instance, processor).image_tokens
    assert found.image_budget % image_tokens == 0
    if "P" not in roles and "D" in roles:
        assert found.token_budget <= MAX_DECODE_ROWS


def test_a_bound_that_not_even_one_item_keeps_warns_and_takes_one(processor: RequestProcessor, tmp_path: Path) -> None:
    instance = loaded("EPD", processor)
    with pytest.warns(TrinityWarning, match="above the bound"):
        found = profile_budgets(instance, processor, 1e-9, BudgetCache(tmp_path))
    assert not found.feasible
    assert (found.token_budget, found.image_budget) == (1, Probe(instance, processor).image_tokens)
    with pytest.warns(TrinityWarning, match="will be missed"):
        assert profile_budgets(instance, processor, 1e-9, BudgetCache(tmp_path)) == found


def test_a_second_start_reads_the_cache(
    processor: RequestProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, cache = loaded("PD", processor), BudgetCache(tmp_path)
    first = profile_budgets(instance, processor, 5.0, cache)
    monkeypatch.setattr(Probe, "prefill", lambda self, tokens: pytest.fail("profiled again"))
    assert profile_budgets(instance, processor, 5.0, cache) == first
    with pytest.raises(BaseException, match="profiled again"):
        profile_budgets(instance, processor, 6.0, cache)


def test_probes_leave_nothing_behind(processor: RequestProcessor) -> None:
    instance = loaded("PD", processor)
    probe = Probe(instance, processor)
    assert probe.prefill(100) > 0
    assert probe.decode(5) > 0
    stage = cast(LanguageStage, instance.stages[-1])
    assert not stage._requests.rows
    assert instance.memory[KV].tensor.isfinite().all()


def test_a_probe_longer_than_the_context_is_several_prompts(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = loaded("P", processor)
    probe = Probe(instance, processor)
    room = 16 * 16
    assert probe._context < room
    steps: list[Step] = []
    forward = LanguageStage.forward

    def seen(stage: LanguageStage, step: Step) -> dict[str, Sampled]:
        steps.append(step)
        return forward(stage, step)

    monkeypatch.setattr(LanguageStage, "forward", seen)
    probe.prefill(room * 2 + 3)
    assert sum(row.length for row in steps[0].prefills) == room * 2 + 3
    assert max(row.length for row in steps[0].prefills) <= probe._context


class Recorder:
    """A stage that runs nothing, and keeps what it was asked to."""

    letters = "PD"

    def __init__(self) -> None:
        self.opened: list[Open] = []
        self.steps: list[Step] = []

    def open(self, request: Open) -> None:
        self.opened.append(request)

    def close(self, request: str) -> None:
        pass

    def forward(self, step: Step) -> None:
        self.steps.append(step)


def test_a_probe_runs_at_the_context_that_is_asked_for() -> None:
    stage = Recorder()
    instance: Any = SimpleNamespace(
        spec=Instance("PD"),
        memory={KV: SimpleNamespace(blocks=16)},
        settings=SimpleNamespace(kv_block_size=16),
        stages=[stage],
    )
    nothing: Any = SimpleNamespace(multimodal=False, context_length=1000)
    probe = Probe(instance, nothing)
    assert (probe.letters, probe.longest) == ("PD", 254)
    probe.decode(3, 200)
    assert [(len(each.work.prompt), len(each.blocks)) for each in stage.opened] == [(200, 13)] * 3
    assert len(stage.steps[0].decodes) == 3
    probe.prefill(50, 100)
    (row,) = stage.steps[1].prefills
    assert (row.start, row.length, len(stage.opened[3].work.prompt)) == (100, 50, 150)


def test_a_gpu_has_done_its_work_when_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = replace_cuda(monkeypatch), list[str]()

    class Noting(Recorder):
        def open(self, request: Open) -> None:
            cuda.launch(lambda: seen.append("what was queued before"), 1)

        def forward(self, step: Step) -> None:
            seen.append("forward")
            cuda.launch(lambda: seen.append("its kernels"), 1)

    instance: Any = SimpleNamespace(
        spec=Instance("PD", device="cuda:1"),
        memory={KV: SimpleNamespace(blocks=16)},
        settings=SimpleNamespace(kv_block_size=16),
        stages=[Noting()],
    )
    nothing: Any = SimpleNamespace(multimodal=False, context_length=1000)
    Probe(instance, nothing).decode(1, 8)
    assert seen == ["what was queued before", "forward", "its kernels"]


def test_slo_sets_the_bound_by_role_and_budgets_by_hand_win(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, float] = {}

    def profile(instance: LoadedInstance, processor: RequestProcessor, limit_s: float) -> StepBudgets:
        asked[instance.spec.roles] = limit_s
        return StepBudgets(token_budget=77, image_budget=33, limit_s=limit_s)

    monkeypatch.setattr(loader, "profile_budgets", profile)
    slo = SLO(ttft=8.0, tbt=0.5)
    instances = name_instances([Instance("E"), Instance("P"), Instance("D"), Instance("EPD")])
    made = load_instances(deployment(slo), instances, processor)
    assert asked == {"E": TTFT_SHARE * 8.0, "P": TTFT_SHARE * 8.0, "D": TBT_SHARE * 0.5, "EPD": TBT_SHARE * 0.5}
    assert {(each.settings.rules.token_budget, each.settings.rules.image_budget) for each in made} == {(77, 33)}
    by_hand = load_instances(deployment(slo, StepBudgets(token_budget=5, image_budget=6)), instances, processor)
    assert {(each.settings.rules.token_budget, each.settings.rules.image_budget) for each in by_hand} == {(5, 6)}
    assert len(asked) == 4


def test_no_slo_profiles_nothing(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "profile_budgets", lambda *given: pytest.fail("profiled without an SLO"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = load_instances(deployment(), name_instances([Instance("EPD")]), processor)
    assert (made[0].settings.rules.token_budget, made[0].settings.rules.image_budget) == (2048, 1)
