"""Text before images that is prefilled while they are encoded: tokens and logits are those of generate().

Encoders are held up until all text that leads has been prefilled, so that no test hangs on who is quicker.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import cache, partial
from typing import Any

import pytest
from msgspec.structs import replace

from support.checkpoint_files import checkpoint
from support.recordings import MULTIMODAL, Served, oracle, problems, serve
from support.request_cases import BLOCK, ask
from support.stage_driver import picture
from trinity.core.instance import steps
from trinity.core.instance.leading_text import begin_leading, finish_leading
from trinity.core.instance.state import State
from trinity.core.messages import Open, Prefill, Step, Stepped
from trinity.core.scheduler import BatchRules, LeadingChunk
from trinity.instance import Instance
from trinity.request import Request
from trinity.stages import EncodeStage
from trinity.testing.oracle import OracleAnswer

BUDGET = 37  # no multiple of a block: whole blocks of it are prefilled ahead, two at a time
RULES = BatchRules(token_budget=BUDGET, image_budget=1)
PATIENCE_S = 60.0
DUAL = ("vision", "language")
APART: dict[str, Any] = {"E+P+D": "E+P+D", "PD+E": "PD+E", "ED+P": "ED+P"}
BESIDE: dict[str, Any] = {
    "EP+D, two lanes": [Instance("EP", lanes=DUAL), Instance("D")],
    "EPD, two lanes": [Instance("EPD", lanes=DUAL)],
}
WORDS = "a boat lies on the shore and a man looks at the sea in the morning, said the old book of the town. " * 3
QUICK = ("llava", "qwen2_5_vl", "gemma3")


def cells() -> list[object]:
    return [
        pytest.param(
            (name, way),
            marks=[pytest.mark.xdist_group(name), *([] if name in QUICK and way == "E+P+D" else [pytest.mark.slow])],
            id=f"{name}-{way}",
        )
        for name in MULTIMODAL
        for way in (*APART, *BESIDE)
    ]


def leading() -> tuple[Request, ...]:
    """Of one to three images with text between them, each with a beginning of its own, longer than two chunks."""
    images = [picture(seed, 90, 70) for seed in range(6)]
    return (
        ask("one", f"First, {WORDS}<image>\nWhat is this?", images[:1], 16),
        ask("two", f"Second, {WORDS}<image> and then, as the book goes on, <image> who?", images[1:3], 16),
        ask("three", f"Third, {WORDS}<image>, <image> or <image>\nWhich?", images[3:], 16),
    )


def following() -> tuple[Request, ...]:
    """The same beginning as another's, with an image that nobody has seen: all of its text is cached."""
    return (ask("again", f"First, {WORDS}<image>\nWhat is this?", [picture(77, 90, 70)], 16),)


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    return {each.request_id: oracle(architecture).answer(each) for each in (*leading(), *following())}


class Holding:
    """Holds each encode up until the text before the request's first image is prefilled, as far as blocks are whole."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._changed = threading.Condition()
        self._forward = EncodeStage.forward
        patch.setattr(steps, "finish_leading", self.finish)
        patch.setattr(EncodeStage, "forward", lambda stage, step: self.forward(stage, step))

    def finish(self, s: State, step: Step, event: Stepped) -> None:
        finish_leading(s, step, event)
        with self._changed:
            for row in step.prefills:
                self.chunks[row.request].append((row.start, row.start + row.length))
            self._changed.notify_all()

    def forward(self, stage: EncodeStage, step: Step) -> Any:
        with self._changed:
            for row in step.encodes:
                if row.item == 0 and row.request != "again":
                    led = partial(self.is_led, row.request, row.span.offset // BLOCK * BLOCK)
                    self._changed.wait_for(led, PATIENCE_S)
        return self._forward(stage, step)

    def is_led(self, request: str, end: int) -> bool:
        return bool(self.chunks[request]) and self.chunks[request][-1][1] == end


def served(architecture: str, way: str, **options: Any) -> Served:
    options = {"rules": RULES, "pools": {"image": 96, "kv": 256}, "image_block_size": 7, **options}
    placement = APART.get(way) or BESIDE[way]
    return serve(checkpoint(architecture), placement, (leading(), following()), **options)


def check_led(found: Served, chunks: dict[str, list[tuple[int, int]]]) -> None:
    """Each text was prefilled once, in several chunks of whole blocks, and as no cache's doing."""
    for request in ("one", "two", "three"):
        whole = found.works[request].media[0].offset // BLOCK * BLOCK
        borders = [0, *(end for _, end in chunks[request])]
        assert [start for start, _ in chunks[request]] == borders[:-1], request
        assert borders[-1] == whole > 2 * BUDGET, request
        assert len(borders) > 3, request
        assert found.outputs[request].cached_tokens == 0, request
        rows = [row for row in found.record.prefills() if row.request == request]
        assert sorted(row.start for row in rows)[: len(borders)] == borders, "nothing is computed twice"
    assert "again" not in chunks
    shared = found.works["one"].media[0].offset // BLOCK * BLOCK
    assert found.outputs["again"].cached_tokens == shared


@pytest.mark.parametrize("cell", cells())
def test_tokens_and_logits_are_those_of_generate(cell: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, way = cell
    wanted = answers(architecture)  # outside of the pipeline's event loop
    held = Holding(monkeypatch)
    found = served(architecture, way)
    assert problems(found, wanted) == {}
    check_led(found, held.chunks)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"depth": 2}, {"reservation": "optimistic"}], ids=str)
@pytest.mark.parametrize("way", ["E+P+D", "PD+E"])
def test_other_ways_to_step_are_exact_too(way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers("llava")
    held = Holding(monkeypatch)
    found = served("llava", way, **options)
    assert problems(found, wanted) == {}
    check_led(found, held.chunks)


def test_switched_off_nothing_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers("llava")
    rules = BatchRules(token_budget=BUDGET, image_budget=1, leading_text=False)
    found = served("llava", "E+P+D", rules=rules)
    assert problems(found, wanted) == {}
    size = {work.request: len(work.prompt) for work in found.works.values()}
    opened = [each for _, each in found.record.commands(Open)]
    assert all(len(each.blocks) * BLOCK >= size[each.work.request] for each in opened)


def test_other_text_in_the_blocks_changes_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what leads is what the request goes on from, so its words must be its own."""
    wanted = answers("llava")
    held = Holding(monkeypatch)

    def begin(s: State, chunk: LeadingChunk) -> Prefill:
        row = begin_leading(s, chunk)
        opened = s.out.pop()
        assert isinstance(opened, Open)
        work = opened.work
        start, end = chunk.start, chunk.start + chunk.length
        mixed = (*work.prompt[:start], *reversed(work.prompt[start:end]), *work.prompt[end:])
        s.out.append(replace(opened, work=replace(work, prompt=mixed)))
        return row

    monkeypatch.setattr(steps, "begin_leading", begin)
    found = served("llava", "E+P+D")
    assert set(problems(found, wanted)) == {"one", "two", "three", "again"}
    assert len(held.chunks) == 3
