"""States in blocks: written once a whole step has succeeded, by the model's own code; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.bamba import modeling_bamba

from support.hybrid_models import HELD, SERVED, STEPWISE, build_hybrid
from support.stage_driver import Pool
from support.text_models import build, generate, make_prompt
from trinity.core.messages import Open, Prefill, ResolvedSampling, Step, Work
from trinity.errors import StageError, UnsupportedModel
from trinity.memory.block_memory import BlockMemory
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model
from trinity.stages.models.states import ALIGN_BYTES, StateLayout, StatePiece, place_pieces

OUTPUTS, CHUNK = 8, 7


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid(tmp_path_factory.mktemp("hybrid") / "lfm2", "lfm2")


class Bench:
    """A stage whose pools are full of what others have left, and requests in it."""

    def __init__(self, directory: Path) -> None:
        self.model = load_model(directory, "PD", dtype="float32")
        shape = self.model.state_shape()
        assert shape is not None
        self.kv, self.states = Pool(BlockMemory(self.model.kv_shape(), 30), 0), BlockMemory(shape, 4)
        self.states.tensor.fill_(65)
        self.stage = LanguageStage(self.model, self.kv.memory, None, states=self.states)

    def open(self, name: str, prompt: list[int], state: tuple[int, ...], **further: Any) -> None:
        work = Work(request=name, prompt=tuple(prompt), max_tokens=OUTPUTS, sampling=ResolvedSampling())
        self.stage.open(Open(work=work, blocks=self.kv.take(6), state=state, **further))

    def step(self, *prefills: Prefill, decodes: tuple[str, ...] = ()) -> dict[str, Any]:
        return self.stage.forward(Step(0, "joint", prefills=prefills, decodes=decodes))


def chunks_of(name: str, length: int) -> list[Prefill]:
    return [Prefill(name, at, min(CHUNK, length - at), at + CHUNK >= length) for at in range(0, length, CHUNK)]


def test_requests_side_by_side_have_their_own_states(lfm2: Path) -> None:
    """One decodes while the other is prefilled, in blocks that are in no order."""
    bench, prompts = Bench(lfm2), {"a": make_prompt(17), "b": make_prompt(31)[::-1]}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    left = {name: chunks_of(name, len(prompt)) for name, prompt in prompts.items()}
    for name, state in (("a", (3,)), ("b", (1,))):
        bench.open(name, prompts[name], state)
    while any(len(found) < OUTPUTS for found in tokens.values()):
        ready = tuple(name for name, found in tokens.items() if 0 < len(found) < OUTPUTS)
        waiting = [left[name].pop(0) for name in left if left[name]]
        for name, one in bench.step(*waiting, decodes=ready).items():
            tokens[name].append(one.token)
    assert tokens == {name: generate(lfm2, prompt, OUTPUTS).tokens for name, prompt in prompts.items()}
    untouched = bench.states.tensor[[0, 2]]
    assert bool((untouched == 65).all())


def test_a_step_that_fails_leaves_states_as_they_were(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = Bench(lfm2), make_prompt(20)
    bench.open("a", prompt, (2,))
    first, second, third = chunks_of("a", len(prompt))
    bench.step(first)
    before = bench.states.tensor.clone()
    sample = bench.stage._sample_rows
    monkeypatch.setattr(bench.stage, "_sample_rows", lambda rows, logits: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bench.step(second)
    assert torch.equal(bench.states.tensor, before)
    monkeypatch.setattr(bench.stage, "_sample_rows", sample)
    bench.step(second)
    assert not torch.equal(bench.states.tensor, before)
    tokens = [bench.step(third)["a"].token, *(bench.step(decodes=("a",))["a"].token for _ in range(OUTPUTS - 1))]
    assert tokens == generate(lfm2, prompt, OUTPUTS).tokens


def test_states_of_other_positions_are_refused(lfm2: Path) -> None:
    bench, prompt = Bench(lfm2), make_prompt(20)
    bench.open("a", prompt, (2,))
    first, second, _ = chunks_of("a", len(prompt))
    bench.step(first)
    bench.step(second)
    with pytest.raises(StageError, match="its states cover 14 positions, and its next row begins at 7"):
        bench.step(second)
    bench.step(first)  # from the beginning it may be run again
    bench.open("b", prompt, ())
    with pytest.raises(StageError, match="without a block for its states"):
        bench.step(Prefill("b", 0, 5, False))


def test_a_block_has_all_states_and_the_cache_the_layers_that_attend(lfm2: Path) -> None:
    model = load_model(lfm2, "D", dtype="float32")
    assert model.states is not None
    assert model.states.kv_layers == (2,)
    assert model.kv_shape(8).shape == (1, 2, 2, 8, 16)
    assert [piece.layer for piece in model.states.pieces] == [0, 1, 3]
    assert all(piece.offset % ALIGN_BYTES == 0 for piece in model.states.pieces)


def test_states_in_float32_have_places_of_their_own() -> None:
    halves = [StatePiece(0, 0, "conv", (3, 5), torch.bfloat16), StatePiece(1, 0, "recurrent", (2,), torch.int64)]
    layout = StateLayout(place_pieces(halves), (2,))
    assert [piece.offset for piece in layout.pieces] == [0, ALIGN_BYTES]
    wide = layout.in_float32()
    assert [(piece.dtype, piece.offset) for piece in wide.pieces] == [(torch.float32, 0), (torch.int64, ALIGN_BYTES)]
    assert (layout.size, wide.size) == (2 * ALIGN_BYTES, 2 * ALIGN_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPWISE)
def test_code_that_begins_anew_runs_token_by_token(name: str, tmp_path: Path) -> None:
    model = load_model(build_hybrid(tmp_path, name), "PD", dtype="float32")
    assert model.states is not None
    assert model.states.one_by_one


def test_a_type_that_forgets_its_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one-token path reads a state of zeros: neither chunks nor single tokens go on from what was before."""
    own = modeling_bamba.mamba2_selective_state_update

    def forget(state: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return own(torch.zeros_like(state), *given, **named)

    monkeypatch.setattr(modeling_bamba, "mamba2_selective_state_update", forget)
    directory = build_hybrid(tmp_path, "bamba")
    for _ in range(2):  # the process holds its weights, and what was tried with them
        with pytest.raises(UnsupportedModel, match="off"):
            load_model(directory, "PD", dtype="float32")


@pytest.mark.parametrize("name", ["recurrent_gemma", pytest.param("minimax", marks=pytest.mark.slow)])
def test_states_that_go_elsewhere_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"transformers' cache|cache of its own"):
        load_model(build(tmp_path, name, num_hidden_layers=3), "PD", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SERVED)
def test_rows_are_held_where_one_runs_otherwise_than_several(name: str, dtype: str, tmp_path: Path) -> None:
    """And not where rounding alone differs: Olmo Hybrid asks a norm for its dtype, and rounded in the check."""
    states = load_model(build_hybrid(tmp_path, name), "PD", dtype=dtype).states
    assert states is not None
    assert states.rows_held is (name == HELD)


@pytest.mark.parametrize("name", [HELD, pytest.param("bamba", marks=pytest.mark.slow)])
def test_bfloat16_serves_with_its_own_dtypes(name: str, tmp_path: Path) -> None:
    model = load_model(build_hybrid(tmp_path, name), "PD", dtype="bfloat16")
    assert model.states is not None
    assert {piece.dtype for piece in model.states.pieces} <= {torch.bfloat16, torch.float32}
    assert np.prod(model.kv_shape().shape[:1]) == 1
