"""Nemotron-H, which runs one row by other arithmetic than several: chunks that end anywhere, and texts run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.nemotron_h import modeling_nemotron_h

from support.hybrid_models import HELD, STEPWISE, build_hybrid
from support.stage_driver import Pool
from support.text_models import Answer, generate, make_prompt
from trinity.core.messages import Open, Prefill, ResolvedSampling, Sampled, Step, Work
from trinity.errors import UnsupportedModel
from trinity.memory.block_memory import BlockMemory
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model
from trinity.stages.models.checks import self_check
from trinity.stages.models.held_rows import bounds_steps, check_inputs
from trinity.stages.models.states import StatefulModule

OUTPUTS = 5
OFF = 1e-4  # of the largest logit
Cuts = Sequence[tuple[int, int]]


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid(tmp_path_factory.mktemp("held") / HELD, HELD)


class Bench:
    """A stage whose pools are full of what others have left; notes the logits of each request's tokens."""

    def __init__(self, directory: Path) -> None:
        self.model = load_model(directory, "PD", dtype="float32")
        shape = self.model.state_shape()
        assert shape is not None
        self.kv, self.states = Pool(BlockMemory(self.model.kv_shape(), 20), 0), Pool(BlockMemory(shape, 5), 1)
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.stage = LanguageStage(self.model, self.kv.memory, None, observe=self._note, states=self.states.memory)

    def _note(self, request: str, index: int, logits: torch.Tensor) -> None:
        self.seen[request, index] = logits.clone()

    def open(self, name: str, prompt: Sequence[int], **further: Any) -> Open:
        work = Work(request=name, prompt=tuple(prompt), max_tokens=OUTPUTS, sampling=ResolvedSampling())
        opened = Open(work=work, blocks=self.kv.take(2), state=self.states.take(1), **further)
        self.stage.open(opened)
        return opened

    def close(self, opened: Open) -> None:
        self.stage.close(opened.work.request)
        self.kv.free.extend(opened.blocks)
        self.states.free.extend(opened.state)

    def step(self, *prefills: Prefill, decodes: Sequence[str] = ()) -> dict[str, Sampled]:
        found: dict[str, Sampled] = self.stage.forward(Step(0, "joint", prefills=prefills, decodes=tuple(decodes)))
        return found

    def serve(self, prompt: Sequence[int], cuts: Cuts, known: Sequence[int] = ()) -> Answer:
        """Prefill a prompt and ``known`` tokens behind it in these chunks, and decode the rest."""
        opened = self.open("a", prompt, tokens=tuple(known), again=bool(known))
        tokens = list(known)
        for low, high in cuts:
            found = self.step(Prefill("a", low, high - low, high == cuts[-1][1]))
        tokens.append(found["a"].token)
        while len(tokens) < OUTPUTS:
            tokens.append(self.step(decodes=("a",))["a"].token)
        self.close(opened)
        return Answer(tokens, torch.stack([self.seen.pop(("a", at)) for at in range(len(known), OUTPUTS)]))


def every_way(length: int) -> Iterator[Cuts]:
    """List every way to cut a text into chunks."""
    for count in range(length):
        for borders in combinations(range(1, length), count):
            yield tuple(pairwise((0, *borders, length)))


def even(length: int, size: int) -> Cuts:
    return tuple((at, min(at + size, length)) for at in range(0, length, size))


def error_of(found: Answer, own: Answer) -> float:
    """Largest difference of logits, relative to the largest; infinite where tokens differ."""
    wanted = own.logits[-len(found.logits) :]
    off = float((found.logits - wanted).abs().max() / own.logits.abs().max())
    return off if found.tokens == own.tokens else float("inf")


@pytest.mark.parametrize("length", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_chunks_may_end_anywhere(length: int, nemotron: Path) -> None:
    bench, prompt = Bench(nemotron), make_prompt(length)
    own = generate(nemotron, prompt, OUTPUTS)
    assert len(set(own.tokens)) > 2, "tokens that do not vary show little"
    assert max(error_of(bench.serve(prompt, cuts), own) for cuts in every_way(length)) < OFF


def test_the_control_rows_alone_give_other_logits(nemotron: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = Bench(nemotron), make_prompt(5)
    own = generate(nemotron, prompt, OUTPUTS)
    monkeypatch.setattr(bench.model.states, "rows_held", False)
    errors = {cuts: error_of(bench.serve(prompt, cuts), own) for cuts in every_way(5)}
    assert {cuts for cuts, error in errors.items() if error > 100 * OFF} == {
        cuts for cuts in errors if any(low + 1 == high for low, high in cuts[1:])
    }


@pytest.mark.parametrize("known", [1, 4])
def test_tokens_are_computed_again_as_they_were_decoded(known: int, nemotron: Path) -> None:
    """As behind a preemption, in chunks of each size; a chunk that runs them with the prompt's rows is far off."""
    bench, prompt = Bench(nemotron), make_prompt(5)
    own = generate(nemotron, prompt, OUTPUTS)
    length = len(prompt) + known
    errors = [error_of(bench.serve(prompt, even(length, size), own.tokens[:known]), own) for size in range(1, length)]
    assert max(errors) < OFF
    later = (*prompt, *own.tokens[:known])
    assert float((generate(nemotron, later, 1).logits - own.logits[known]).abs().max()) > 100 * OFF


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tokens_are_computed_again_in_chunks_that_end_anywhere(nemotron: Path) -> None:
    bench, prompt = Bench(nemotron), make_prompt(4)
    own = generate(nemotron, prompt, OUTPUTS)
    errors = [error_of(bench.serve(prompt, cuts, own.tokens[:4]), own) for cuts in every_way(len(prompt) + 4)]
    assert max(errors) < OFF


def test_requests_side_by_side_hold_their_own_rows(nemotron: Path) -> None:
    """One decodes while others are prefilled in chunks of one, two and three rows, and all from one block of each."""
    bench, sizes = Bench(nemotron), {"a": 3, "b": 1, "c": 2, "d": 1}
    prompts = {name: make_prompt(9 + number)[number:] for number, name in enumerate(sizes)}
    left = {name: list(even(len(prompts[name]), size)) for name, size in sizes.items()}
    tokens: dict[str, list[int]] = {name: [] for name in sizes}
    for name, prompt in prompts.items():
        bench.open(name, prompt)
    while any(len(found) < OUTPUTS for found in tokens.values()):
        ready = [name for name, found in tokens.items() if 0 < len(found) < OUTPUTS]
        waiting = [(name, *left[name].pop(0)) for name in left if left[name]]
        asked = [Prefill(name, low, high - low, not left[name]) for name, low, high in waiting]
        for name, one in bench.step(*asked, decodes=ready).items():
            tokens[name].append(one.token)
    for name, prompt in prompts.items():
        logits = torch.stack([bench.seen[name, at] for at in range(OUTPUTS)])
        assert error_of(Answer(tokens[name], logits), generate(nemotron, prompt, OUTPUTS)) < OFF


def test_a_step_that_failed_or_begins_anew_finds_its_rows(nemotron: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = Bench(nemotron), make_prompt(9)
    sample = bench.stage._sample_rows
    bench.open("a", prompt)
    bench.step(Prefill("a", 0, 2, False))
    bench.step(Prefill("a", 0, 3, False))  # from the beginning: of the two rows that were held none is
    monkeypatch.setattr(bench.stage, "_sample_rows", lambda rows, logits: 1 / 0)
    for length in (1, 4):
        with pytest.raises(ZeroDivisionError):
            bench.step(Prefill("a", 3, length, False))
    monkeypatch.setattr(bench.stage, "_sample_rows", sample)
    bench.step(Prefill("a", 3, 1, False))
    token = bench.step(Prefill("a", 4, 5, True))["a"].token
    own = generate(nemotron, prompt, 1)
    assert error_of(Answer([token], bench.seen["a", 0][None]), own) < OFF


def test_a_type_whose_step_forgets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step differs from its whole forward for another reason than Nemotron-H's: it reads a state of zeros."""
    own = modeling_nemotron_h.mamba2_selective_state_update

    def forget(state: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        found: torch.Tensor = own(torch.zeros_like(state), *given, **named)
        return found

    monkeypatch.setattr(modeling_nemotron_h, "mamba2_selective_state_update", forget)
    with pytest.raises(UnsupportedModel, match="off"):
        load_model(build_hybrid(tmp_path, HELD), "PD", dtype="float32")


@pytest.mark.parametrize("least", [0.5, pytest.param(0.8, marks=pytest.mark.slow), 2.0])
def test_bounds_that_move_steps_further_than_states_do_are_served(least: float, tmp_path: Path) -> None:
    """A step is then as far from the whole forward as one without states, and forgets nothing."""
    directory, prompt = build_hybrid(tmp_path, HELD, time_step_min=least), make_prompt(5)
    bench, own = Bench(directory), generate(directory, prompt, OUTPUTS)
    assert bench.model.states is not None
    assert bench.model.states.rows_held
    assert max(error_of(bench.serve(prompt, even(5, size)), own) for size in (1, 2, 5)) < OFF
    layer = next(each for each in bench.model.language.modules() if hasattr(each, "time_step_limit"))
    assert layer.time_step_limit == (least, float("inf")), "the check has left the bounds off"


def test_code_that_runs_one_by_one_and_bounds_steps_is_refused(tmp_path: Path) -> None:
    """A row alone would run by other bounds than ``generate()`` has for a prompt. No type of transformers is so."""
    model = load_model(build_hybrid(tmp_path, STEPWISE[0]), "PD", dtype="float32")
    layer: Any = next(each for each in model.language.modules() if isinstance(each, StatefulModule))
    self_check(model)
    layer.time_step_limit = (0.01, float("inf"))
    with pytest.raises(UnsupportedModel, match="does not go on with several rows at once, and bounds time steps"):
        self_check(model)


def test_what_cannot_be_held_back_is_refused() -> None:
    rows = torch.zeros(1, 4, 8)
    check_inputs({"hidden_states": rows, "attention_mask": None, "scale": torch.zeros(8)}, "hidden_states", 4)
    with pytest.raises(UnsupportedModel, match="has position_embeddings besides"):
        check_inputs({"hidden_states": rows, "position_embeddings": (rows, rows)}, "hidden_states", 4)


def test_two_kinds_of_states_in_a_layer_are_not_held_back(nemotron: Path) -> None:
    states = load_model(nemotron, "PD", dtype="float32").states
    assert states is not None
    parts = [StatefulModule(), StatefulModule()]
    for part in parts:
        part.trinity_state_layer = 3
    with pytest.raises(UnsupportedModel, match="two kinds of states"):
        states.hold_rows(torch.nn.ModuleList(parts), 64)


def test_rows_are_held_by_what_the_code_bounds_and_not_by_what_a_check_meets(tmp_path: Path) -> None:
    """Steps far above the least one in whatever the check runs: another prompt may have smaller ones."""
    directory = build_hybrid(tmp_path, HELD)
    weights = load_file(directory / "model.safetensors")
    found = [name for name in weights if name.endswith("dt_bias")]
    save_file({**weights, **{name: weights[name] * 0 + 9.0 for name in found}}, directory / "model.safetensors")
    model = load_model(directory, "PD", dtype="float32")
    assert found
    assert model.states is not None
    assert model.states.rows_held
    first = model.states.pieces
    for _ in range(2):  # as of a model that was refused, which the process holds, and which is tried again
        self_check(model)
        assert model.states.rows_held
        assert model.states.pieces == first


def test_bounds_that_bound_nothing_hold_no_rows(tmp_path: Path) -> None:
    model = load_model(build_hybrid(tmp_path, "bamba"), "PD", dtype="float32")
    assert model.states is not None
    assert not model.states.rows_held
    assert not bounds_steps(model.language)
    layer = next(each for each in model.language.modules() if hasattr(each, "time_step_limit"))
    for bounds in ((0.01, float("inf")), (0.0, 0.5)):
        layer.time_step_limit = bounds
        assert bounds_steps(model.language)
