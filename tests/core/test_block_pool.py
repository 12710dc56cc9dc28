"""BlockPool and FreeRuns against naive models; keys that tell apart what must not be shared."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity.core import block_pool
from trinity.core.block_pool import FEW_ENTRIES, BlockPool, FreeRuns
from trinity.core.messages import MediaSpan
from trinity.core.prefix_cache import media_keys, prefix_keys, uncut_blocks
from trinity.core.values import blocks_for

SIZE = 12


def naive_take(free: set[int], count: int) -> list[int]:
    """The smallest run that holds all, the first of several; else the longest run, the first of several, and so on."""
    taken: list[int] = []
    while len(taken) < count:
        runs: list[list[int]] = []
        for block in sorted(free):
            if runs and runs[-1][-1] == block - 1:
                runs[-1].append(block)
            else:
                runs.append([block])
        left = count - len(taken)
        fitting = [run for run in runs if len(run) >= left]
        best = min(fitting, key=len) if fitting else max(runs, key=len)
        taken += best[:left]
        free -= set(best[:left])
    return taken


class Runs(RuleBasedStateMachine):
    """FreeRuns beside a set of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.free = FreeRuns(SIZE), set(range(SIZE))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        assert self.runs.take(count) == naive_take(self.free, count)

    @precondition(lambda self: len(self.free) < SIZE)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        taken = sorted(set(range(SIZE)) - self.free)
        blocks = data.draw(st.lists(st.sampled_from(taken), unique=True) | st.just(taken))
        self.runs.give(blocks)
        self.free.update(blocks)

    @invariant()
    def same(self) -> None:
        assert self.runs.count == len(self.free)
        assert [block for start, end in self.runs.runs() for block in range(start, end)] == sorted(self.free)


class Pool(RuleBasedStateMachine):
    """BlockPool beside counts, keys and an order of eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("kv", SIZE)
        self.counts = dict.fromkeys(range(SIZE), 0)
        self.keys: dict[int, bytes] = {}
        self.order: list[int] = []
        self.evicted = 0

    def cached(self) -> list[int]:
        return [block for block in self.order if block in self.keys and not self.counts[block]]

    def held(self) -> list[int]:
        return [block for block, count in self.counts.items() if count]

    def available(self) -> int:
        return SIZE - len(self.held())

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.available()))
        assert self.pool.fits(count)
        assert not self.pool.fits(self.available() + 1)
        free = {block for block in range(SIZE) if not self.counts[block] and block not in self.keys}
        for block in self.cached()[: max(0, count - len(free))]:
            del self.keys[block]
            free.add(block)
            self.evicted += 1
        blocks = self.pool.allocate(count)
        assert list(blocks) == naive_take(free, count)
        self.counts.update(dict.fromkeys(blocks, 1))

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        able = sorted({*self.held(), *self.keys})
        blocks = data.draw(st.lists(st.sampled_from(able), max_size=4)) if able else []
        self.pool.hold(blocks)
        for block in blocks:
            self.counts[block] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        for block in data.draw(st.lists(st.sampled_from(self.held()), unique=True, min_size=1)):
            self.pool.drop([block])
            self.counts[block] -= 1
            self.order = [each for each in self.order if each != block] + [block]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self.held()))
        self.pool.publish(block, key)
        if key not in self.keys.values():
            self.keys.setdefault(block, key)

    @rule(cleared=st.just(True))
    def clear(self, cleared: bool) -> None:
        self.evicted += len(self.cached())
        self.pool.clear()
        self.keys = {}

    @invariant()
    def same(self) -> None:
        self.pool.check()
        assert {block: self.pool.references(block) for block in range(SIZE)} == self.counts
        assert {block for block in range(SIZE) if self.pool.published(block)} == set(self.keys)
        assert (self.pool.available, self.pool.held) == (self.available(), len(self.held()))
        assert self.pool.evictions == self.evicted
        for block, key in self.keys.items():
            assert self.pool.match([key, b"none", key]) == (block,)
        assert self.pool.match([b"none"]) == ()


TestRuns = Runs.TestCase
TestPool = Pool.TestCase
TestRuns.settings = TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_consecutive_blocks_are_handed_out_together() -> None:
    runs = FreeRuns(10)
    assert runs.take(10) == list(range(10))
    for block in (0, 1, 4, 5, 6, 8):
        runs.give((block,))
    assert runs.take(1) == [8], "the smallest run that fits"
    assert runs.take(2) == [0, 1]
    assert runs.take(3) == [4, 5, 6]
    assert runs.count == 0
    assert FreeRuns(0).count == 0
    assert FreeRuns(0).runs() == []
    assert FreeRuns(0).take(0) == []


def test_runs_that_touch_become_one_from_either_side() -> None:
    for order in ((2, 0, 1), (0, 1, 2), (2, 1, 0), (1, 0, 2)):
        runs = FreeRuns(3)
        runs.take(3)
        for block in order:
            runs.give((block,))
        assert runs.take(3) == [0, 1, 2]


def test_the_longest_run_is_taken_first_where_none_fits() -> None:
    runs = FreeRuns(9)
    runs.take(9)
    for block in (0, 2, 3, 5, 6, 8):
        runs.give((block,))
    assert runs.take(5) == [2, 3, 5, 6, 0]


def bytecodes(call: Callable[[], object]) -> int:
    """Count the bytecodes that block_pool.py executes: a measure of its work that no load changes."""
    executed = 0

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal executed
        if frame.f_code.co_filename != block_pool.__file__:
            return None
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return executed


@pytest.mark.parametrize("gap", [2, 3])
def test_a_piece_costs_the_same_however_many_runs_are_free(gap: int) -> None:
    costs = []
    for size in (1 << 8, 1 << 12, 1 << 15):
        runs = FreeRuns(size)
        runs.give([block for block in runs.take(size) if block % gap])
        costs.append(bytecodes(lambda: runs.give(runs.take(64))))  # noqa: B023
    assert costs[-1] <= 1.5 * costs[0], f"grows with the runs: {costs}"


def test_a_full_cache_is_evicted_in_time_proportional_to_what_is_asked() -> None:
    costs = []
    for size in (1 << 9, 1 << 12):
        pool = BlockPool("kv", size)
        blocks = pool.allocate(size)
        for block in blocks:
            pool.publish(block, block.to_bytes(4, "little"))
        pool.drop(blocks[::2])
        pool.drop(blocks[1::2])
        costs.append(bytecodes(lambda: pool.allocate(size // 2)) / size)  # noqa: B023
        assert pool.evictions == size // 2
    assert costs[1] <= 1.5 * costs[0], f"a block costs more in a larger pool: {costs}"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 400))
def test_larger_pools_choose_as_the_plain_rule_does(seed: int, size: int) -> None:
    """Hundreds of runs of many lengths, also ones that come and go without being taken."""
    drawn = random.Random(seed)
    runs, free = FreeRuns(size), set(range(size))
    for _ in range(120):
        count = drawn.randint(0, min(len(free), 40))
        assert runs.take(count) == naive_take(free, count)
        taken = [block for block in range(size) if block not in free]
        back = drawn.sample(taken, drawn.randint(0, min(len(taken), 40)))
        runs.give(back)
        free.update(back)
    assert sum(end - start for start, end in runs.runs()) == runs.count == len(free)


def test_runs_that_come_and_go_leave_no_entries_behind() -> None:
    runs = FreeRuns(1024)
    runs.take(1024)
    runs.give((512,))
    for _ in range(1000):
        for block in (0, 1):
            runs.give((block,))
        assert runs.take(2) == [0, 1]
    assert sum(map(len, runs._starts.values())) <= 2 * len(runs.runs()) + FEW_ENTRIES + 1


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool("image", 3)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    pool.drop((1, 0, 2))
    pool.hold((1,))
    pool.drop((1,))
    assert pool.match([b"a", b"b", b"c"]) == (0, 1, 2)
    assert pool.allocate(1) == (0,)
    assert pool.match([b"a"]) == ()
    assert pool.allocate(1) == (2,)
    assert pool.match([b"b"]) == (1,)
    assert pool.evictions == 2


def test_fits_counts_hits_that_are_cached_alone() -> None:
    pool = BlockPool("kv", 4)
    for block, key in zip(pool.allocate(2), (b"a", b"b"), strict=True):
        pool.publish(block, key)
    pool.drop((0,))
    assert pool.available == 3
    assert pool.fits(3)
    assert not pool.fits(4)
    assert pool.fits(3, hits=(1,)), "held already"
    assert pool.fits(2, hits=(0, 1)), "0 is cached and will be held"
    assert not pool.fits(3, hits=(0,))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool: pool.allocate(4), "pool kv: 4 blocks asked of 3"),
        (lambda pool: pool.hold([0]), "pool kv: block 0 is free and cannot be held"),
        (lambda pool: pool.drop([0]), "pool kv: block 0 has no reference to drop"),
        (lambda pool: pool.publish(0, b"a"), "pool kv: block 0 is not held and has no content"),
    ],
)
def test_wrong_use_is_a_mistake_of_the_caller(wrong: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        wrong(BlockPool("kv", 3))  # type: ignore[operator]


def broken_pool(how: str) -> BlockPool:
    pool = BlockPool("kv", 3)
    pool.publish(pool.allocate(1)[0], b"a")
    if how == "lost":
        pool._references[0] = 0
    elif how == "twice":
        pool._references[1] = 1
    elif how == "key":
        pool._block[b"a"] = 2
    elif how == "more keys":
        pool._block[b"b"] = 2
    elif how == "cached":
        pool._free.take(2)
        pool._cached[1] = pool._cached[2] = None
    elif how == "cached and free":
        pool._cached[2] = None
    elif how == "overlap":
        pool._free._end[2] = 3
    return pool


@pytest.mark.parametrize("how", ["lost", "twice", "key", "more keys", "cached", "cached and free", "overlap"])
def test_check_finds_what_is_wrong(how: str) -> None:
    broken_pool("").check()
    with pytest.raises(AssertionError):
        broken_pool(how).check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def span(content: str = "cat", offset: int = 2, length: int = 3, kind: str = "image", tokens: int = 3) -> MediaSpan:
    return MediaSpan(kind, tokens, offset, length, content)


def test_a_key_for_each_full_block_alone() -> None:
    assert [len(prefix_keys([7] * count, (), 4)) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert {len(key) for key in prefix_keys([7] * 40, (), 4)} == {16}


def test_a_key_is_of_all_tokens_up_to_its_end() -> None:
    one, two = prefix_keys([1, 2, 3, 4, 5, 6, 7, 8], (), 4), prefix_keys([1, 2, 3, 9, 5, 6, 7, 8], (), 4)
    assert one[0] != two[0]
    assert one[1] != two[1], "although its own tokens are the same"
    assert prefix_keys([1, 2, 3, 4, 5, 6, 7, 9], (), 4)[0] == one[0]
    assert len(set(prefix_keys([1] * 40, (), 4))) == 10


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param((span("dog"),), [], id="another image"),
        pytest.param((), [], id="none"),
        pytest.param((span(offset=3),), [], id="another place"),
        pytest.param((span(offset=4),), [], id="in the next block"),
        pytest.param((span(), span("dog", 9)), [0, 1], id="one more behind"),
        pytest.param((span(), span("dog", 5)), [0], id="one more in the second block"),
    ],
)
def test_the_same_text_with_other_images_does_not_match(other: tuple[MediaSpan, ...], same: list[int]) -> None:
    """The image lies at [2, 5), so that it touches both of the first two blocks."""
    tokens = [7] * 12
    mine, theirs = prefix_keys(tokens, (span(),), 4), prefix_keys(tokens, other, 4)
    assert [index for index, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] == pair[1]] == same


def test_an_image_counts_in_the_blocks_that_it_touches() -> None:
    """[4, 8) is the whole second block: the first does not know it, and the third follows from the second."""
    with_it = prefix_keys([7] * 12, (span(offset=4, length=4),), 4)
    without = prefix_keys([7] * 12, (), 4)
    assert [mine == theirs for mine, theirs in zip(with_it, without, strict=True)] == [True, False, False]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.data())
def test_prefixes_match_just_as_far_as_text_and_images_agree(tokens: list[int], data: st.DataObject) -> None:
    spots = data.draw(st.lists(st.integers(0, len(tokens) - 1), unique=True, max_size=3))
    contents = [data.draw(st.sampled_from("ab")) for _ in spots]
    others = [data.draw(st.sampled_from("ab")) for _ in spots]
    mine = [span(content, spot, 1) for content, spot in zip(contents, spots, strict=True)]
    theirs = [span(content, spot, 1) for content, spot in zip(others, spots, strict=True)]
    agree = min([spot for spot, a, b in zip(spots, contents, others, strict=True) if a != b], default=len(tokens))
    one, two = prefix_keys(tokens, mine, 4), prefix_keys(tokens, theirs, 4)
    equal = [a == b for a, b in zip(one, two, strict=True)]
    assert equal == [end <= agree for end in range(4, len(tokens) + 1, 4)]


def test_media_keys_are_one_for_each_block_and_of_all_that_identifies_the_features() -> None:
    keys = media_keys(span(tokens=9), 4)
    assert len(keys) == len(set(keys)) == 3
    assert {len(key) for key in keys} == {16}
    assert media_keys(span(tokens=9, offset=77, length=50), 4) == keys, "wherever it stands"
    for other in (span("dog", tokens=9), span(kind="video", tokens=9), span(tokens=10)):
        assert not set(media_keys(other, 4)) & set(keys)


def whole(length: int, offset: int = 2) -> MediaSpan:
    """An item in a prompt of ``length`` positions, all of which see each other."""
    return MediaSpan("image", 2, offset, 2, "cat", whole=length)


@pytest.mark.parametrize("media", [(), (span(offset=1, length=2),)], ids=["text", "image"])
def test_a_salt_changes_every_key_and_none_is_no_salt(media: tuple[MediaSpan, ...]) -> None:
    """Else a client could learn by the time of an answer what another tenant has asked."""
    plain, *salted = (prefix_keys([7] * 12, media, 4, salt) for salt in ("", "a", "b", "ab"))
    assert plain == prefix_keys([7] * 12, media, 4)
    keys = [key for each in (plain, *salted) for key in each]
    assert len({*keys}) == len(keys) == 12
    assert salted[0] == prefix_keys([7] * 12, media, 4, "a")


def test_no_hit_cuts_a_prompt_that_sees_itself_whole() -> None:
    assert whole(10).uncut == (0, 10)
    assert [uncut_blocks(count, (whole(10),), 4) for count in (0, 1, 2, 3)] == [0, 0, 0, 3]
    assert [uncut_blocks(count, (whole(8),), 4) for count in (1, 2)] == [0, 2]


def test_a_longer_prompt_that_sees_itself_whole_has_other_keys() -> None:
    tokens = (1, 2, 9, 9, 3, 4, 5, 6)
    longer, same = prefix_keys((*tokens, 7, 8), (whole(10),), 4), prefix_keys((*tokens, 1), (whole(8),), 4)
    assert same == prefix_keys(tokens, (whole(8),), 4), "outputs behind it change nothing"
    assert not set(longer) & set(same), "what its first tokens see is more"
    assert not set(same) & set(prefix_keys(tokens, (MediaSpan("image", 2, 2, 2, "cat"),), 4))


def test_a_span_that_may_be_cut_is_uncut_nowhere() -> None:
    span = MediaSpan("image", 2, 2, 2, "cat")
    assert span.uncut[0] == span.uncut[1]
    assert MediaSpan("image", 2, 2, 2, "cat", atomic=True).uncut == (2, 4)
    assert uncut_blocks(3, (span,), 1) == 3
