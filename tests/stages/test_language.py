"""LanguageStage and EncodeStage by themselves: what they keep, what they refuse; a failed step changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.language_stage import PROMPT, Solo, work
from support.stage_driver import Driver
from trinity.core.messages import Prefill, Work
from trinity.errors import StageError
from trinity.stages.attention.fp8 import storage
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.base import Stage


def test_stages_implement_the_protocol() -> None:
    solo, driver = Solo(), Driver("llava")
    assert isinstance(solo.stage, Stage)
    assert isinstance(driver.encode, Stage)
    assert isinstance(driver.prefill, Stage)
    stages = (solo.stage, driver.encode, driver.prefill, driver.decode)
    assert [each.letters for each in stages] == ["PD", "E", "P", "D"]


def test_a_stage_runs_only_the_rows_of_its_letters() -> None:
    solo = Solo(letters="P")
    solo.open(work())
    assert solo.step(decodes=("a",)) == {}
    first = solo.fill(work())
    decode = Solo(letters="D")
    decode.open(work(), tokens=(first,))
    assert decode.step(Prefill("a", 0, 37, True)) == {}


def test_a_chunk_that_is_not_the_last_samples_nothing() -> None:
    solo = Solo()
    solo.open(work())
    assert solo.step(Prefill("a", 0, 30, False)) == {}
    assert list(solo.step(Prefill("a", 30, 7, True))) == ["a"]
    assert list(solo.seen) == [("a", 0)]


@given(st.lists(st.integers(1, 36), max_size=6, unique=True))
@settings(max_examples=25)
def test_chunks_of_any_size_give_the_same_logits(cuts: list[int]) -> None:
    solo = Solo()
    solo.open(work())
    borders = [0, *sorted(cuts), len(PROMPT)]
    for start, end in pairwise(borders):
        solo.step(Prefill("a", start, end - start, end == len(PROMPT)))
    whole = Solo()
    whole.open(work())
    whole.fill(work())
    assert (solo.seen["a", 0] - whole.seen["a", 0]).abs().max() < 1e-4


def test_tokens_do_not_depend_on_the_batch() -> None:
    """Sampled ones neither: 20 requests of many lengths that come and go, beside each one alone."""
    rng = np.random.default_rng(5)
    asked = [
        work(
            f"r{number}",
            tuple(rng.integers(5, 340, rng.integers(2, 90)).tolist()),
            temperature=number % 3 / 2,
            seed=number,
            repetition_penalty=1.0 if number % 2 else 1.3,
            logprobs=2 if number % 5 == 0 else None,
        )
        for number in range(20)
    ]
    alone = {each.request: Solo().serve(each) for each in asked}
    solo, together = Solo(blocks=200), {each.request: list[int]() for each in asked}
    waiting, running = list(asked), list[Work]()
    while waiting or running:
        started, waiting = waiting[:3], waiting[3:]
        for each in started:
            solo.open(each)
        prefills = [Prefill(each.request, 0, len(each.prompt), True) for each in started]
        sampled = solo.step(*prefills, decodes=tuple(each.request for each in running))
        for name, one in sampled.items():
            together[name].append(one.token)
            assert (one.logprob is not None) == (name in ("r0", "r5", "r10", "r15"))
        running = [each for each in [*running, *started] if len(together[each.request]) < 12]
        for name in {name for name in sampled if len(together[name]) == 12}:
            solo.stage.close(name)
    assert together == alone


def test_a_migrated_request_goes_on_where_it_was() -> None:
    """Open with three outputs: the KV of all but the last is in the blocks."""
    here, there = Solo(), Solo()
    opened = here.open(work())
    tokens = [here.fill(work())] + [here.step(decodes=("a",))["a"].token for _ in range(2)]
    moved = there.pool.take(len(opened.blocks))
    there.pool.memory.tensor[list(moved)] = here.pool.memory.tensor[list(opened.blocks)]
    there.open(work(), tuple(tokens), moved)
    for index in (3, 4, 5):
        assert there.step(decodes=("a",)) == here.step(decodes=("a",))
        assert torch.equal(there.seen["a", index], here.seen["a", index])


def test_outputs_can_be_prefilled_again_after_preemption() -> None:
    solo, again = Solo(), Solo()
    solo.open(work())
    tokens = [solo.fill(work())] + [solo.step(decodes=("a",))["a"].token for _ in range(4)]
    again.open(work(), tuple(tokens[:3]))
    assert again.step(Prefill("a", 0, 38, False)) == {}
    assert again.step(Prefill("a", 38, 2, True))["a"].token == tokens[3]
    assert again.step(decodes=("a",))["a"].token == tokens[4]
    assert (again.seen["a", 4] - solo.seen["a", 4]).abs().max() < 1e-4


def test_a_cached_prefix_needs_no_prefill() -> None:
    solo = Solo()
    first = solo.open(work())
    solo.fill(work())
    blocks = first.blocks[:2] + solo.pool.take(3)
    solo.open(work("b", (*PROMPT[:32], 9, 8, 7)), blocks=blocks)
    solo.step(Prefill("b", 32, 3, True))
    fresh = Solo()
    fresh.open(asked := work("b", (*PROMPT[:32], 9, 8, 7)))
    fresh.fill(asked)
    assert (solo.seen["b", 0] - fresh.seen["b", 0]).abs().max() < 1e-4


def test_stages_of_several_threads_share_one_model() -> None:
    asked = [work(f"r{number}", tuple(range(5 + number, 40 + 9 * number))) for number in range(4)]
    alone = [Solo().serve(each) for each in asked]
    solos = [Solo() for _ in asked]
    assert len({id(solo.model.language) for solo in solos}) == 1
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(Solo.serve, solos, asked)) == alone


def test_slots_are_used_again_and_tables_grow() -> None:
    solo = Solo(blocks=400)
    long = work("long", tuple(range(5, 305)))
    for number in range(30):
        solo.open(work(f"r{number}", max_tokens=2))
        solo.fill(work(f"r{number}"))
        if number % 3:
            solo.stage.close(f"r{number}")
    before = solo.step(decodes=("r0", "r27"))
    solo.open(long)
    solo.fill(long)
    assert set(solo.step(decodes=("r3", "long", "r0"))) == {"r3", "long", "r0"}
    assert len(solo.stage._requests.token) <= 16
    assert before["r0"] == before["r27"], "equal prompts"


# ---------------------------------------------------------------- failures


class Failing(TorchAttention):
    """Fails in the second layer, when asked to."""

    broken = False

    def write(self, rows: Any, cache: Any, key: Any, value: Any, layer: int) -> None:
        if self.broken and layer == 1:
            raise RuntimeError("out of luck")
        super().write(rows, cache, key, value, layer)


def test_a_failed_step_can_be_repeated() -> None:
    expected = Solo().serve(work(temperature=1.0, seed=3, repetition_penalty=1.2))
    solo = Solo(backend=(backend := Failing()))
    asked = work(temperature=1.0, seed=3, repetition_penalty=1.2)
    solo.open(asked)
    found = []
    for index in range(12):
        step = {"decodes": ("a",)} if index else {}
        prefills = () if index else (Prefill("a", 0, 37, True),)
        backend.broken = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of luck"):
                solo.step(*prefills, **step)
        backend.broken = False
        found.append(solo.step(*prefills, **step)["a"].token)
    assert found == expected


def test_nan_stays_with_its_request() -> None:
    """It fails alone, the others go on, and whoever gets its blocks next meets no NaN."""
    expected = Solo().serve(work("good"), 6)
    solo = Solo()
    bad = solo.open(work("bad", tuple(range(60, 100))))
    solo.open(work("good"))
    solo.fill(work("bad", tuple(range(60, 100))))
    tokens = [solo.fill(work("good"))]
    solo.pool.memory.tensor[bad.blocks[2], 0, 1] = torch.nan
    with pytest.raises(StageError, match="NaN"):
        solo.step(decodes=("good", "bad"))
    with pytest.raises(StageError, match="NaN"):
        solo.step(decodes=("bad",))
    tokens.append(solo.step(decodes=("good",))["good"].token)
    kept = solo.pool.memory.tensor[bad.blocks[0]].clone()
    solo.stage.close("bad")
    assert solo.pool.memory.tensor.isfinite().all()
    assert torch.equal(solo.pool.memory.tensor[bad.blocks[0]], kept), "sound blocks may be cached: left as they are"
    solo.open(work("next"), blocks=bad.blocks[::-1])
    assert solo.fill(work("next")) == tokens[0]
    tokens += [solo.step(decodes=("good",))["good"].token for _ in range(4)]
    assert tokens == expected


def test_nan_in_an_fp8_cache_stays_with_its_request() -> None:
    solo = Solo(kv_dtype="fp8_e4m3")
    expected = solo.serve(work("good"), 3)
    bad = solo.open(work("bad", tuple(range(60, 100))))
    solo.fill(work("bad", tuple(range(60, 100))))
    held = storage(solo.pool.memory.tensor)
    held[bad.blocks[2], 0, 1] = 0x7F
    kept = held[bad.blocks[0]].clone()
    with pytest.raises(StageError, match="NaN"):
        solo.step(decodes=("bad",))
    solo.stage.clean({"bad"})
    assert ((held & 0x7F) != 0x7F).all()
    assert torch.equal(held[bad.blocks[0]], kept)
    solo.stage.close("bad")
    solo.open(work("next"), blocks=bad.blocks[::-1])
    tokens = [solo.fill(work("next"))]
    tokens += [solo.step(decodes=("next",))["next"].token for _ in range(2)]
    assert tokens == expected


def test_a_row_that_goes_well_behind_one_that_failed_clears_no_suspicion() -> None:
    """Two steps in flight: the second chunk runs although the first has left NaN, and samples nothing to show it."""
    solo = Solo(backend=(backend := Failing()))
    opened = solo.open(work("bad", tuple(range(60, 100))))
    backend.broken = True
    with pytest.raises(RuntimeError, match="out of luck"):
        solo.step(Prefill("bad", 0, 16, False))
    backend.broken = False
    solo.pool.memory.tensor[opened.blocks[0]] = torch.nan
    solo.step(Prefill("bad", 16, 8, False))
    solo.stage.close("bad")
    assert solo.pool.memory.tensor.isfinite().all()


def test_padding_reads_no_block_of_anybody_else() -> None:
    """Tables of short rows are padded to the longest; NaN in every block but their own shows where it reads."""
    short, long = work("short", PROMPT[:5], 8), work("long", tuple(range(5, 105)), 8)
    solo = Solo()
    blocks = [solo.open(short, blocks=(3,)).blocks]  # opened before the tables grow wide
    blocks.append(solo.open(long, blocks=tuple(range(20, 27))).blocks)
    blocks.append(solo.open(work("late", PROMPT[:5], 8), blocks=(5,)).blocks)
    for each in (short, long, work("late", PROMPT[:5], 8)):
        solo.fill(each)
    free = sorted(set(range(solo.pool.memory.blocks)) - {block for table in blocks for block in table})
    solo.pool.memory.tensor[free] = torch.nan
    sampled = solo.step(decodes=("short", "long", "late"))
    assert sampled["short"] == sampled["late"]
    assert torch.isfinite(solo.seen["short", 1]).all()


def _unknown(solo: Solo) -> None:
    solo.step(decodes=("nobody",))


def _closed(solo: Solo) -> None:
    solo.stage.close("a")
    solo.stage.close("a")
    solo.step(Prefill("a", 0, 5, False))


def _early(solo: Solo) -> None:
    solo.step(decodes=("a",))


def _twice(solo: Solo) -> None:
    solo.open(work())


def _beyond_the_text(solo: Solo) -> None:
    solo.step(Prefill("a", 30, 8, True))


def _empty(solo: Solo) -> None:
    solo.step(Prefill("a", 3, 0, False))


def _beyond_its_blocks(solo: Solo) -> None:
    solo.open(work("b", (1, 2, 3) * 5, max_tokens=1))
    solo.fill(work("b", (1, 2, 3) * 5))
    solo.step(decodes=("b",))
    solo.step(decodes=("b",))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_unknown, "not open"),
        (_closed, "not open"),
        (_early, "before its prefill ended"),
        (_twice, "opened twice"),
        (_beyond_the_text, r"prefill of \[30, 38\) in a text of 37"),
        (_empty, r"prefill of \[3, 3\)"),
        (_beyond_its_blocks, r"position 16 lies beyond its blocks \(16"),
    ],
)
def test_what_no_sound_core_asks_for(act: Callable[[Solo], None], why: str) -> None:
    solo = Solo()
    solo.open(work())
    with pytest.raises(StageError, match=why) as caught:
        act(solo)
    assert caught.value.request_id in ("a", "b", "nobody")
    assert len(solo.serve(work("after"))) == 12
