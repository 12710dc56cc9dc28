"""Checks of KV that is fetched ahead of a prefill (``trinity.core.migration.prefix_fetch``), after every event.

Who waits for an answer holds no block for it; who holds some has a pull in flight. What is pulled is what was leased.
Each fetch has one answer, and each lease one Release, also where the request has ended. A step prefills no text that a
fetch may still bring.
"""

from __future__ import annotations

from collections.abc import Mapping

from trinity.core import InstanceCore
from trinity.core.messages import KV, Fetch, Fetched, Pull, Pulled, Send, Step, Value


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
