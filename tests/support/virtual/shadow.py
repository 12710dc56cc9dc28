"""Follows the content of every block without tensors: each row reads the right data, and nothing overwrites it.

A row of an image or KV block holds a tag: what the model would have computed there. A step or a pull tears its target
rows while it runs and leaves their tags at its end. All that it reads must be whole and right at its start and at its
end. So a block reused too early, a wrong prefix cache hit or a part that is read before it was ready shows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trinity.core.instance.state import Settings
from trinity.core.messages import (
    KV,
    STATE,
    Close,
    Collect,
    Collected,
    Encode,
    Grow,
    LayersWritten,
    MediaSpan,
    Open,
    Prefill,
    Pull,
    Pulled,
    Step,
    Stepped,
    Submit,
    Value,
    Work,
)
from trinity.stage_kinds import features_of

Tag = tuple[object, ...]
TORN: Tag = ("torn",)
Layers = tuple[int, int] | None


@dataclass
class ShadowRow:
    """A request as the stages of one instance know it."""

    opened: Open
    tags: list[Tag] = field(default_factory=list)
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.blocks = self.opened.blocks

    @property
    def length(self) -> int:
        """Number of prefilled positions: the prompt, and outputs where they are computed again."""
        return len(self.opened.work.prompt) + (len(self.opened.tokens) if self.opened.again else 0)

    def grow(self, blocks: tuple[int, ...]) -> None:
        assert not set(blocks) & set(self.blocks), f"{self.opened.work.request} got {blocks} and has {self.blocks}"
        self.blocks += blocks


def _hears_all(name: str, peer: str) -> bool:
    return False


class ShadowPool:
    """Tags of one pool, ``rows`` per block in each of ``layers``; all torn at first."""

    def __init__(self, blocks: int, rows: int, layers: int = 1) -> None:
        self.rows, self.layers = rows, layers
        self.tags: list[list[Tag]] = [[TORN] * (blocks * rows) for _ in range(layers)]

    def places(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        """Find the pool's rows of positions [start, end) of a sequence in these blocks."""
        return [blocks[at // self.rows] * self.rows + at % self.rows for at in range(start, end)]

    def read(self, blocks: Sequence[int], start: int, end: int, layers: Layers = None) -> list[list[Tag]]:
        """Read the tags of these positions, by layer."""
        places = self.places(blocks, start, end)
        return [[tags[place] for place in places] for tags in self.tags[slice(*(layers or (0, self.layers)))]]

    def write(self, blocks: Sequence[int], start: int, found: Sequence[Sequence[Tag]], layers: Layers = None) -> None:
        """Write tags from position ``start`` on, by layer."""
        for tags, new in zip(self.tags[slice(*(layers or (0, self.layers)))], found, strict=True):
            for place, tag in zip(self.places(blocks, start, start + len(new)), new, strict=True):
                tags[place] = tag


class ShadowMemory(dict[tuple[str, str], ShadowPool]):
    """Pools of all instances, by instance and kind: each with nothing in it until its present life writes there.

    settings: those of the present lives.
    """

    def __init__(self, settings: Mapping[str, Settings]) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, key: tuple[str, str]) -> ShadowPool:
        name, kind = key
        own = self._settings[name]
        rows = {KV: own.kv_block_size, STATE: 1}.get(kind, own.image_block_size)
        self[key] = made = ShadowPool(own.pools[kind], rows, own.layers if kind == KV else 1)
        return made


class Shadow:
    """Does the work of the stages and the connector with tags instead of tensors."""

    def __init__(self, settings: Mapping[str, Settings], is_deaf: Callable[[str, str], bool] = _hears_all) -> None:
        self._is_deaf = is_deaf  # whether the first has not heard yet of the second's death, and may read its next life
        self.memory, self._settings = ShadowMemory(settings), settings
        self._rows: dict[tuple[str, str], ShadowRow] = {}
        self._steps: dict[tuple[str, str], deque[Step]] = {}  # of each lane; the first one runs
        self._failed: set[tuple[str, str]] = set()  # whose rows in later steps have nothing to go on from
        self._pulls: dict[tuple[str, str, int], tuple[Pull, ShadowPool, list[list[Tag]]]] = {}
        self._again: set[tuple[str, str]] = set()  # sources and requests of which a step began anew in its middle
        self._void: set[tuple[str, str, int]] = set()
        self._prompts: dict[str, list[Tag]] = {}
        self._copies: dict[tuple[str, str], Collect] = {}
        self._works: dict[str, Work] = {}

    def lost(self, name: str) -> None:
        """Drop all that it did; who reads its memory just now may still get what was there."""
        for key in [key for key in self.memory if key[0] == name]:
            del self.memory[key]
        self._rows = {key: row for key, row in self._rows.items() if key[0] != name}
        self._steps = {key: flight for key, flight in self._steps.items() if key[0] != name}
        self._failed = {key for key in self._failed if key[0] != name}
        self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != name}
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != name}

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Stepped):
            flight = self._steps[name, event.lane]
            self._end_step(name, flight.popleft(), event)
            if flight:
                self._start_step(name, flight[0])
        elif isinstance(event, LayersWritten):
            self._progress(name, self._steps[name, event.lane][0], event)
        elif isinstance(event, Pulled):
            self._end_pull(name, event)
        elif isinstance(event, Collected):
            self._check_copy(name, self._copies.pop((name, event.request)))
        elif isinstance(event, Submit):
            self._works[event.work.request] = event.work

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Open):
            self._open(name, command)
        elif isinstance(command, Grow):
            for request, blocks in command.blocks.items():
                self._rows[name, request].grow(blocks)
        elif isinstance(command, Close):
            self._close(name, command.request)
        elif isinstance(command, Step):
            flight = self._steps.setdefault((name, command.lane), deque())
            if not flight:
                self._start_step(name, command)
            flight.append(command)
        elif isinstance(command, Pull):
            self._start_pull(name, command)
        elif isinstance(command, Collect):
            self._copies[name, command.request] = command
            self._check_copy(name, command)

    def after_event(self, name: str) -> None:
        """Do nothing: content changes with commands and results alone."""

    def at_end(self) -> None:
        assert not self._rows, f"not closed: {sorted(self._rows)}"
        assert not any(self._steps.values()), f"steps without an end: {self._steps}"
        assert not self._pulls, f"pulls without an end: {self._pulls}"
        assert not self._copies, f"copies without an end: {self._copies}"

    def _open(self, name: str, opened: Open) -> None:
        key = (name, opened.work.request)
        assert key not in self._rows, f"{key} was opened before"
        row = self._rows[key] = ShadowRow(opened, self.text(opened.work, opened.tokens))
        there = row.length + len(opened.tokens) - 1 if opened.tokens and not opened.again else opened.cached
        self._check_kv(name, row, there)
        self._check_states(name, row, there)

    def _close(self, name: str, request: str) -> None:
        for (instance, _), flight in self._steps.items():
            for step in flight:
                rows = [each.request for each in step.prefills] + list(step.decodes)
                assert instance != name or request not in rows, f"{name} closed {request} while {step} runs"
        del self._rows[name, request]
        self._failed.discard((name, request))

    def _start_step(self, name: str, step: Step) -> None:
        self._check_reads(name, step)
        for encode in step.encodes:
            self._features_at(name, encode.span).write(encode.blocks, 0, [[TORN] * encode.span.tokens])
        for prefill in step.prefills:
            _check_chunk(self._rows[name, prefill.request], prefill)
            self._write_kv(name, prefill.request, prefill.start, [TORN] * prefill.length)
        for request in step.decodes:
            row = self._rows[name, request]
            self._write_kv(name, request, len(row.tags) - 1, [TORN])

    def _progress(self, name: str, step: Step, event: LayersWritten) -> None:
        """Write some layers of the prefills, or tear all where they are about to be written again."""
        for prefill in step.prefills:
            tags = self._rows[name, prefill.request].tags[prefill.start : prefill.start + prefill.length]
            if event.layers is None:
                self._begin_again(name, prefill)
                tags = [TORN] * len(tags)
            self._write_kv(name, prefill.request, prefill.start, tags, event.layers)

    def _begin_again(self, name: str, prefill: Prefill) -> None:
        """Mark pulls that read these rows as void: they may get old or new bytes."""
        size = self.memory[name, KV].rows
        blocks = self._rows[name, prefill.request].blocks
        torn = set(blocks[prefill.start // size : -(-(prefill.start + prefill.length) // size)])
        self._again.add((name, prefill.request))
        for key, (pull, _, _) in self._pulls.items():
            if pull.source == name and pull.kind == KV and torn & set(pull.source_blocks):
                self._void.add(key)

    def _end_step(self, name: str, step: Step, result: Stepped) -> None:
        self._check_reads(name, step)
        self._failed.update((name, request) for request in result.failed if (name, request) in self._rows)
        for encode in step.encodes:
            if encode.request not in result.failed:
                self._encode(name, encode)
        for prefill in step.prefills:
            if prefill.request not in result.failed:
                row = self._rows[name, prefill.request]
                tags = row.tags[prefill.start : prefill.start + prefill.length]
                self._write_kv(name, prefill.request, prefill.start, tags)
                self._write_states(name, row, prefill.start + prefill.length)
        for request in step.decodes:
            if request not in result.failed:
                row = self._rows[name, request]
                self._write_kv(name, request, len(row.tags) - 1, row.tags[-1:])
                self._write_states(name, row, len(row.tags))
        for request, sampled in result.sampled.items():
            row = self._rows[name, request]
            row.tags.append(_next(row.tags, sampled.token, ()))

    def _check_reads(self, name: str, step: Step) -> None:
        for prefill in step.prefills:
            if (name, prefill.request) in self._failed:
                continue
            row = self._rows[name, prefill.request]
            self._check_kv(name, row, prefill.start)
            self._check_states(name, row, prefill.start)
            end = prefill.start + prefill.length
            for item, span in enumerate(row.opened.work.media):
                if span.offset < end and span.end > prefill.start:
                    self._check_image(name, row, item, span)
        for request in step.decodes:
            if (name, request) in self._failed:
                continue
            row = self._rows[name, request]
            assert len(row.tags) > row.length, f"{name} decodes {request} before its first token"
            self._check_kv(name, row, len(row.tags) - 1)
            self._check_states(name, row, len(row.tags) - 1)

    def _check_kv(self, name: str, row: ShadowRow, end: int) -> None:
        there = self.memory[name, KV].read(row.blocks, 0, end)
        right = all(tags == row.tags[:end] for tags in there)
        assert right, f"{name}: the KV of {row.opened.work.request} before {end} is wrong"

    def _check_states(self, name: str, row: ShadowRow, end: int) -> None:
        """Check that its block holds the states behind its first ``end`` positions; before 0 there are none."""
        if end and row.opened.state:
            there = self.memory[name, STATE].read(row.opened.state, 0, 1)
            assert there == [row.tags[end - 1 : end]], f"{name}: states before {end} are wrong"

    def _write_states(self, name: str, row: ShadowRow, end: int) -> None:
        if row.opened.state:
            self.memory[name, STATE].write(row.opened.state, 0, [row.tags[end - 1 : end]])

    def _check_image(self, name: str, row: ShadowRow, item: int, span: MediaSpan) -> None:
        there = self._features_at(name, span).read(row.opened.images[item], 0, span.tokens)
        assert there == [_features(span)], f"{name}: item {item} of {row.opened.work.request} is not in its blocks"

    def _encode(self, name: str, encode: Encode) -> None:
        self._features_at(name, encode.span).write(encode.blocks, 0, [_features(encode.span)])

    def _features_at(self, name: str, span: MediaSpan) -> ShadowPool:
        """Find the pool of an instance that has features of such media."""
        return self.memory[name, features_of(span.kind)]

    def _write_kv(self, name: str, request: str, start: int, tags: list[Tag], layers: Layers = None) -> None:
        memory = self.memory[name, KV]
        count = memory.layers if layers is None else layers[1] - layers[0]
        memory.write(self._rows[name, request].blocks, start, [tags] * count, layers)

    def _check_copy(self, name: str, copy: Collect) -> None:
        """Check that what is copied for a reader are the features of the request's media, first and last."""
        media = self._works[copy.request].media
        assert len(media) == len(copy.items), f"{copy} of {len(media)} media"
        for span, (blocks, rows) in zip(media, copy.items, strict=True):
            found = self._features_at(name, span).read(blocks, 0, rows)
            assert found == [_features(span)], f"{name} copies {found} for {span}"

    def _start_pull(self, name: str, pull: Pull) -> None:
        source, target = self._source_of(name, pull), self.memory[name, pull.kind]
        rows = len(pull.source_blocks) * source.rows - (source.rows - pull.tail if pull.tail else 0)
        key = (name, pull.offer, pull.part)
        self._pulls[key] = (pull, source, source.read(pull.source_blocks, 0, rows, pull.layers))
        if self._is_deaf(name, pull.source):
            self._void.add(key)
        layers = target.layers if pull.layers is None else pull.layers[1] - pull.layers[0]
        target.write(pull.target_blocks, 0, [[TORN] * rows] * layers, pull.layers)

    def _source_of(self, name: str, pull: Pull) -> ShadowPool:
        """Find the pool that is read: torn blocks where ``name`` has yet to hear that its owner has become another."""
        own = self._settings[pull.source]
        if pull.kind not in own.pools and self._is_deaf(name, pull.source):
            like = self.memory[name, pull.kind]
            return ShadowPool(1 + max(pull.source_blocks), like.rows, like.layers)
        return self.memory[pull.source, pull.kind]

    def _end_pull(self, name: str, event: Pulled) -> None:
        pull, source, before = self._pulls.pop((name, event.offer, event.part))
        target = self.memory[name, pull.kind]
        there = source.read(pull.source_blocks, 0, len(before[0]), pull.layers)
        key, again = (name, event.offer, event.part), (pull.source, pull.request) in self._again
        if key in self._void or (again and there != before):
            there = before = [[TORN] * len(tags) for tags in there]  # it has to come again
        assert there == before or event.failure is not None, f"the source of {pull} changed while it ran"
        if event.failure is None:
            target.write(pull.target_blocks, 0, there, pull.layers)

    def text(self, work: Work, tokens: Sequence[int]) -> list[Tag]:
        """Tag the KV of each position of a prompt and the outputs behind it."""
        tags = list(self._prompt(work))
        for token in tokens:
            tags.append(_next(tags, token, ()))
        return tags

    def _prompt(self, work: Work) -> list[Tag]:
        """Tag the KV of each prompt position by all it depends on: tokens up to it and the media they stand for."""
        if work.request not in self._prompts:
            tags: list[Tag] = []
            for position, token in enumerate(work.prompt):
                inside = tuple((s.content, position - s.offset) for s in work.media if s.offset <= position < s.end)
                tags.append(_next(tags, token, inside))
            self._prompts[work.request] = tags
        return self._prompts[work.request]


def _next(tags: list[Tag], token: int, inside: Tag) -> Tag:
    return ("kv", hash((tags[-1] if tags else None, token, inside)))


def _features(span: MediaSpan) -> list[Tag]:
    return [(span.kind, span.content, row) for row in range(span.tokens)]


def _check_chunk(row: ShadowRow, chunk: Prefill) -> None:
    end = chunk.start + chunk.length
    assert chunk.length > 0, f"{chunk} is empty"
    assert chunk.last == (end == row.length), f"{chunk} of a text of {row.length}"
    for span in row.opened.work.media:
        for border in (chunk.start, end):
            assert not span.uncut[0] < border < span.uncut[1], f"{chunk} cuts {span}"
