"""Texts on the device: each takes what it is long, in memory that stays and in what a step makes for a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.bare_table import bare_table
from support.device_waits import DEVICE, no_device_waits
from support.language_stage import PROMPT, Solo, work
from trinity.core.messages import Open, Prefill, ResolvedSampling, Step, Work
from trinity.stages import token_bans
from trinity.stages import token_bans as device_texts
from trinity.stages.async_steps import DeviceTokens, FinishedStep, LaunchedStep, draw_next
from trinity.stages.language import LanguageStage
from trinity.stages.token_bans import TEXT_PAGE, DeviceTexts

CPU = torch.device("cpu")
LONG, MANY = 131_072, 256
WAYS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 3000},
    {"bad_words_ids": ((5, 6), (1, 2, 3))},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "temperature": 1.0, "top_p": 0.9, "seed": 5},
]


class Allocations(TorchDispatchMode):
    """Counts the bytes of every tensor that an operator makes on the stand-in device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.is_meta and _storage(each) not in given:  # and no view
                self.bytes += (size := each.untyped_storage().nbytes())
                self.largest = max(self.largest, size)
        return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_one_long_text_among_short_ones_costs_its_own_length(way: dict[str, Any]) -> None:
    """255 rows of 40 tokens and one of 131,072: padded to the longest they took gigabytes for a moment."""
    table, kept = bare_table(), DeviceTokens(DEVICE)
    for number in range(MANY):
        prompt = tuple(range(2, 42)) if number else (1,) * LONG
        asked = Work(request=str(number), prompt=prompt, max_tokens=8, sampling=ResolvedSampling(**way))
        table.open(Open(work=asked, blocks=tuple(range(3 if number else LONG // 16 + 1))))
    rows = list(table.rows.values())
    slots, tokens = table.slots_of(rows), LONG + (MANY - 1) * TEXT_PAGE
    with no_device_waits(), Allocations() as made:
        draw_next(torch.empty((MANY, 50), device=DEVICE), table, rows, slots, kept)
    assert made.largest <= max(8 * tokens, 8 * token_bans._MOST_ELEMENTS), "a number for each token, or a bounded piece"
    assert way.get("no_repeat_ngram_size") == 3000 or made.bytes < 250 * tokens, "all of a step's together"
    assert kept.texts.ids.numel() <= 2 * tokens


def test_pages_are_taken_as_texts_grow_and_given_back() -> None:
    texts, slots = DeviceTexts(CPU), np.array([7, 2])
    sizes, told = np.array([TEXT_PAGE - 1, 3]), torch.Generator().manual_seed(0)
    wanted = [torch.randint(0, 99, (size,), generator=told).tolist() for size in sizes]
    assert texts.reserve(slots, sizes)
    for slot, ids in zip(slots.tolist(), wanted, strict=True):
        texts.write(slot, 0, np.array([-1, *ids[1:]]))
        ids[0] = token_bans.NO_TOKEN
    for step in range(3):
        assert texts.reserve(slots, sizes + 1)
        texts.append(slots, sizes, torch.tensor([step, -1]))
        for ids, token in zip(wanted, (step, 0), strict=True):
            ids.append(token)
        sizes = sizes + 1
        found = texts.select(slots, sizes).read()
        for row, ids in enumerate(wanted):
            start = int(found.starts[row])
            assert found.ids[start : start + len(ids)].tolist() == ids
        assert found.newest(2).tolist() == [ids[-2:] for ids in wanted]
        assert found.newest(6)[1].tolist() == [-1] * (6 - len(wanted[1][-6:])) + wanted[1][-6:]
        (alone,) = (texts.select(slots, sizes).part(1, 2).read(),)
        assert alone.newest(2).tolist() == [wanted[1][-2:]]
        assert alone.tokens(50)[: len(wanted[1])].tolist() == [min(each, 50) for each in wanted[1]]
        assert set(alone.tokens(50)[len(wanted[1]) :].tolist()) == {50}
    taken = len(texts._free)
    texts.release(7)
    texts.release(9)
    assert len(texts._free) == taken + 2


def test_what_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_texts, "MOST_PAGES", 4)
    texts = DeviceTexts(CPU)
    assert not texts.reserve(np.array([1, 2]), np.array([3 * TEXT_PAGE, TEXT_PAGE + 1]))
    assert texts.reserve(np.array([1, 2]), np.array([3 * TEXT_PAGE, TEXT_PAGE]))
    assert not texts.reserve(np.array([3]), np.array([1]))
    texts.release(1)
    assert texts.reserve(np.array([3]), np.array([3 * TEXT_PAGE]))
    assert texts.ids.shape == (4, TEXT_PAGE)


def test_texts_without_room_are_sampled_at_once_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_texts, "MOST_PAGES", 1)
    works = [work(name, PROMPT[at:], repetition_penalty=1.5) for at, name in enumerate("ab")]
    solo, kinds = Solo(), list[type]()
    stage = LanguageStage(solo.model, solo.pool.memory, None)
    solo.stage = stage
    tokens: dict[str, list[int]] = {each.request: [] for each in works}
    steps = [Step(0, "joint", prefills=(Prefill(each.request, 0, len(each.prompt), True),)) for each in works]
    for each in works:
        solo.open(each)
    for step in [*steps, *(Step(1, "joint", decodes=("a", "b")) for _ in range(3)), Step(1, "joint", decodes=("a",))]:
        pending = stage.launch_on_device(step)
        kinds.append(type(pending))
        for name, one in pending.wait().items():
            tokens[name].append(one.token)
    assert kinds == [LaunchedStep, *(FinishedStep,) * 4, LaunchedStep]
    assert tokens["a"] == Solo().serve(works[0], 5)
    assert tokens["b"] == Solo().serve(works[1], 4)
    stage.close("a")
    assert len(stage._tokens.texts._free) == 1
