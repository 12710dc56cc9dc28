"""Checks of prefix caches: what can be matched there is what its key says, and what is fetched by key was leased.

A wrong hit would show when somebody reads it (``Shadow``), which may be never in a run. So ``Matchable`` looks at each
block as it is published, whoever publishes it: behind a step, a pull, or a transfer that broke off. One that was pulled
must be out of a step that has ended well: one that has begun anew writes other bytes, of which nobody tells a lost
reader.

``FetchRules`` is for KV that is fetched ahead of a prefill (``trinity.core.migration.prefix_fetch``). Who waits for an
answer holds no block for it; who holds some has a pull in flight. What is pulled is what was leased. Each fetch has one
answer, and each lease one Release, also where the request has ended. A step prefills no text that a fetch may still
bring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from support.virtual.shadow import Shadow, Tag
from trinity.core import InstanceCore
from trinity.core.messages import (
    KV,
    Commit,
    Fetch,
    Fetched,
    Grow,
    Offer,
    Open,
    Pull,
    Pulled,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
    Work,
)
from trinity.core.prefix_cache import Key, prefix_keys

Written = tuple[str, str, int]  # instance, request and block of what a prefill writes


class Matchable:
    """Compares newly published KV blocks with the texts of all requests: prompts, and outputs that messages tell of.

    - ``compared``: how many blocks were.
    """

    def __init__(self, cores: Mapping[str, InstanceCore], shadow: Shadow) -> None:
        self.cores, self.shadow = cores, shadow
        self.compared = 0
        self._said: dict[Key, Sequence[Tag]] = {}  # what a block under this key holds
        self._learnt: set[object] = set()
        self._offered: dict[str, Work] = {}
        self._seen: dict[str, tuple[int, dict[int, Key]]] = {}
        self._tables: dict[tuple[str, str], tuple[int, ...]] = {}
        self._running: dict[tuple[str, str], deque[set[Written]]] = {}  # by instance and lane
        self._unfinished: set[Written] = set()
        self._pulls: dict[tuple[str, str, int], Pull] = {}
        self._origins: dict[tuple[str, int], Written] = {}  # of each block that was pulled

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, (Submit, Offer)) and name in self.cores:  # readers of two front ends may use one name
            self._learn(event.work, event.tokens)
        if isinstance(event, Offer):
            self._offered[event.id] = event.work
        elif isinstance(event, Commit) and event.id in self._offered:
            self._learn(self._offered[event.id], event.tokens)
        elif isinstance(event, Stepped):
            ended = self._running[name, event.lane].popleft()
            self._unfinished |= {each for each in ended if each[1] in event.failed}
        elif isinstance(event, Pulled):
            pull = self._pulls.pop((name, event.offer, event.part), None)
            if pull is not None and event.failure is None:
                for source, place in zip(pull.source_blocks, pull.target_blocks, strict=True):
                    self._origins[name, place] = (pull.source, pull.request, source)

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Open):
            self._tables[name, command.work.request] = command.blocks
        elif isinstance(command, Pull) and command.kind == KV:
            self._pulls[name, command.offer, command.part] = command
        elif isinstance(command, Grow):  # decodes write here, whatever had been pulled to these blocks before
            for block in sum(command.blocks.values(), ()):
                self._origins.pop((name, block), None)
        elif isinstance(command, Step):
            written = self._list_written(name, command)
            self._running.setdefault((name, command.lane), deque()).append(written)
            for _, _, block in written:
                self._origins.pop((name, block), None)

    def _list_written(self, name: str, step: Step) -> set[Written]:
        """List the blocks that the prefills of a step write to."""
        size = self.cores[name].settings.kv_block_size
        return {
            (name, row.request, block)
            for row in step.prefills
            for block in self._tables[name, row.request][row.start // size : -(-(row.start + row.length) // size)]
        }

    def after_event(self, name: str) -> None:
        if name not in self.cores or KV not in self.cores[name].state.pools:
            return
        pool, (changes, before) = self.cores[name].state.kv, self._seen.get(name, (0, {}))
        if pool.changes != changes:
            now = pool.contents()
            for block, key in now.items() - before.items():
                self._compare(name, block, key)
            self._seen[name] = (pool.changes, now)

    def _compare(self, name: str, block: int, key: Key) -> None:
        said, origin = self._said.get(key), self._origins.get((name, block))
        running = any(origin in step for flight in self._running.values() for step in flight)
        ended = origin not in self._unfinished and not running
        assert ended, f"{name}: block {block} is not what its key says, if its step begins anew: {origin}"
        if said is not None:
            self.compared += 1
            there = self.shadow.memory[name, KV].read((block,), 0, len(said))
            assert all(tags == said for tags in there), f"{name}: block {block} is not what its key says"

    def lost(self, name: str) -> None:
        """Count what it was writing as never finished; its memory is gone."""
        for key in [key for key in self._running if key[0] == name]:
            self._unfinished.update(*self._running.pop(key))
        self._seen.pop(name, None)
        self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != name}
        self._origins = {key: origin for key, origin in self._origins.items() if key[0] != name}

    def at_end(self) -> None:
        """Do nothing: all was compared as it came."""

    def _learn(self, work: Work, tokens: Sequence[int]) -> None:
        media = tuple((span.content, span.offset, span.length) for span in work.media)
        for size in {core.settings.kv_block_size for core in self.cores.values()}:
            named = (size, work.prompt, tuple(tokens), media, work.salt)
            if named in self._learnt:
                continue
            self._learnt.add(named)
            tags = self.shadow.text(work, tokens)
            keys = prefix_keys((*work.prompt, *tokens), work.media, size, work.salt)
            self._said.update((key, tags[at * size : (at + 1) * size]) for at, key in enumerate(keys))


class FetchRules:
    """Follows fetches of KV by id.

    - ``pulled``: how many blocks were brought.
    """

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self.cores = cores
        self.pulled = 0
        self._asked: dict[str, Fetch] = {}
        self._leased: dict[str, Fetched] = {}
        self._pulls: dict[tuple[str, str], Pull] = {}  # in flight, by instance and fetch

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Pulled):
            pull = self._pulls.pop((name, f"{event.offer}/{event.part}"), None)
            self.pulled += len(pull.source_blocks) if pull is not None and event.failure is None else 0

    def command(self, name: str, command: Value) -> None:
        message = command.message if isinstance(command, Send) else None
        if isinstance(message, Fetch) and message.kind == KV:
            assert message.id not in self._asked, f"{message} again"
            assert "P" in self.cores[name].settings.roles, f"{name} prefills nothing, and sends {message}"
            self._asked[message.id] = message
        elif isinstance(message, Fetched) and message.kind == KV:
            assert len(message.blocks) <= len(self._asked[message.id].keys), f"{message} of more than was asked for"
            self._leased[message.id] = message
        elif isinstance(command, Pull) and f"{command.offer}/{command.part}" in self._asked:
            self._pull(name, command)
        elif isinstance(command, Step):
            state = self.cores[name].state
            waiting = {(each.request, each.attempt) for each in state.prefix_fetches.values()}
            for row in command.prefills:
                attempt = state.requests[row.request].attempt
                assert (row.request, attempt) not in waiting, f"{name} prefills {row}, which a fetch may bring"

    def _pull(self, name: str, pull: Pull) -> None:
        id = f"{pull.offer}/{pull.part}"
        blocks, count = self._leased[id].blocks, len(pull.source_blocks)
        first = blocks.index(pull.source_blocks[0])
        assert pull.source == self._leased[id].holder, f"{pull} of what {self._leased[id].holder} has leased"
        assert pull.source_blocks == blocks[first : first + count], f"{pull} reads beyond {blocks}"
        assert len(pull.target_blocks) == count > 0, f"{pull} pairs no blocks"
        self._pulls[name, id] = pull

    def after_event(self, name: str) -> None:
        core = self.cores.get(name)
        for id, asked in core.state.prefix_fetches.items() if core is not None else ():
            holds, pulls = bool(asked.ahead or asked.places), (name, id) in self._pulls
            assert holds is pulls, f"{name} {'holds blocks' if holds else 'pulls'} for {id}: {asked}"

    def lost(self, name: str) -> None:
        self._pulls = {key: pull for key, pull in self._pulls.items() if key[0] != name}

    def at_end(self) -> None:
        assert not self._pulls, f"pulls without an end: {self._pulls}"
