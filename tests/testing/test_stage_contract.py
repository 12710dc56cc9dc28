"""Every built-in stage and the example's keep the contract of stages; a broken one is caught by it, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from examples.custom_stage import MosaicStage
from support.checkpoint_files import checkpoint
from support.hybrid_models import build_hybrid
from trinity.core.messages import IMAGE, KV, STATE, Grow, Open, Sampled, Step
from trinity.errors import StageError
from trinity.stages.base import StageSetup
from trinity.stages.encode import EncodeStage
from trinity.stages.language import LanguageStage
from trinity.testing.stage_contract import check_stage


def encoder(setup: StageSetup) -> EncodeStage:
    return EncodeStage(setup.model, setup.memory[IMAGE])


def language(letters: str) -> Callable[[StageSetup], LanguageStage]:
    return lambda setup: LanguageStage(
        setup.model, setup.memory[KV], setup.memory.get(IMAGE), letters, states=setup.memory.get(STATE)
    )


@pytest.mark.parametrize(
    "factory",
    [encoder, language("PD"), language("P"), language("D"), MosaicStage],
    ids=["E", "PD", "P", "D", "the example's"],
)
def test_stages_keep_the_contract(factory: Any) -> None:
    check_stage(factory, model=checkpoint("llava"))


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_with_other_models(name: str) -> None:
    check_stage(language("PD"), model=checkpoint(name))


@pytest.mark.parametrize("letters", ["PD", "D"])
@pytest.mark.slow
def test_with_a_model_that_keeps_states(letters: str, tmp_path: Path) -> None:
    check_stage(language(letters), model=build_hybrid(tmp_path / "lfm2", "lfm2"))


def test_a_stage_that_loses_states_is_caught(tmp_path: Path) -> None:
    class Stateless(Around):
        """Begins with no states whatever a request has."""

        def open(self, request: Open) -> None:
            self.setup.memory[STATE].tensor.zero_()
            super().open(request)

    with pytest.raises(AssertionError, match="outputs are"):
        check_stage(lambda setup: Stateless(setup, language("PD")), model=build_hybrid(tmp_path / "lfm2", "lfm2"))


def test_without_a_model_one_is_built() -> None:
    check_stage(encoder, roles="E")


# ---------------------------------------------------------------- broken ones


class Around:
    """Passes everything on to a stage of trinity's."""

    def __init__(self, setup: StageSetup, inner: Callable[[StageSetup], Any]) -> None:
        self.setup, self.inner, self.letters = setup, inner(setup), inner(setup).letters
        self.turns = 0

    def open(self, request: Open) -> None:
        self.inner.open(request)

    def grow(self, more: Grow) -> None:
        self.inner.grow(more)

    def close(self, request: str) -> None:
        self.inner.close(request)

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.turns += 1
        found: dict[str, Sampled] = self.inner.forward(step)
        return found


class Spilling(Around):
    """Writes into a block that is not its own."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        self.setup.memory[IMAGE if self.letters == "E" else KV].tensor[63] = 0.25
        return super().forward(step)


class Lazy(Around):
    """Encodes the first image of a step."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        return super().forward(replace(step, encodes=step.encodes[:1]))


class Moody(Around):
    """Features depend on how often it was called."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        found = super().forward(step)
        for item in step.encodes:
            self.setup.memory[IMAGE].tensor[list(item.blocks)] += self.turns
        return found


class Nan(Around):
    def forward(self, step: Step) -> dict[str, Sampled]:
        found = super().forward(step)
        for item in step.encodes:
            self.setup.memory[IMAGE].tensor[item.blocks[0], 0] = torch.nan
        return found


class Eager(Around):
    """Samples after every chunk."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        return super().forward(replace(step, prefills=tuple(replace(row, last=True) for row in step.prefills)))


class Forgetful(Around):
    """Does not forget a request that is closed."""

    def close(self, request: str) -> None:
        return None


class Swallowing(Around):
    """Says nothing of a request that it does not know."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        try:
            return super().forward(step)
        except StageError:
            return {}


class Deaf(Around):
    """Does not hear of blocks that come later."""

    def grow(self, more: Grow) -> None:
        return None


class Crossed(Around):
    """Answers the decodes of a step in the wrong order."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        found = super().forward(step)
        return found if step.prefills else dict(zip(found, reversed(list(found.values())), strict=True))


class Mute(Around):
    def forward(self, step: Step) -> Any:
        super().forward(step)


class Renamed(Around):
    def __init__(self, setup: StageSetup, inner: Callable[[StageSetup], Any]) -> None:
        super().__init__(setup, inner)
        self.letters = "X"


E, PD = encoder, language("PD")
BROKEN: dict[str, tuple[type[Around], Any, str]] = {
    "writes elsewhere": (Spilling, E, "features_fill_their_own_blocks: blocks of other images"),
    "writes elsewhere in KV": (Spilling, PD, "a_prompt_writes_its_own_blocks: KV blocks of others"),
    "one of a batch": (Lazy, E, "features_do_not_depend_on_the_batch"),
    "by turn": (Moody, E, "features_do_not_depend_on_place_or_turn"),
    "NaN": (Nan, E, "NaN or infinity"),
    "samples early": (Eager, PD, r"to 3 of \d+ samples \['0'\], not \[\]"),
    "never closes": (Forgetful, PD, "the stage raised"),
    "swallows": (Swallowing, PD, "must raise StageError"),
    "deaf": (Deaf, PD, "blocks_may_come_as_it_decodes"),
    "crossed": (Crossed, PD, "decodes_of_one_step_do_not_mix"),
    "mute": (Mute, E, "returns samples by request"),
    "other letters": (Renamed, E, "letters are roles of the instance"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_stage_is_caught(broken: str) -> None:
    kind, inner, said = BROKEN[broken]
    with pytest.raises(AssertionError, match=said):
        check_stage(lambda setup: kind(setup, inner), model=checkpoint("llava"))


def test_what_is_no_stage_is_told_by_what_it_lacks() -> None:
    with pytest.raises(AssertionError, match="lacks letters, open, close, forward"):
        check_stage(lambda setup: object(), model=checkpoint("llava"))  # type: ignore[arg-type,return-value]
