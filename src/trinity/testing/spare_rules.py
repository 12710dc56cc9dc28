"""Checks of work that idle instances take from their siblings: who asks, who answers, and what is handed over."""

from __future__ import annotations

from collections.abc import Mapping

from trinity.core import InstanceCore
from trinity.core.messages import PeerDown, PeerSuspect, PeerUp, Send, Step, Submit, Value
from trinity.core.peer_exit import PeerLeaving
from trinity.core.spare_work import Spare


class SpareRules:
    """Rules: what is handed over had not begun where it waited, is there no more, and is handed over once in each life.

    Nobody is told of work who does not want any, as far as was said, nor takes any while something is here or is to
    come. Each take has one answer, at once: a request or none. Each word that something waits has one as well, where
    neither of the two has died: words of a former life may come to the next one.
    """

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self.cores = cores
        self.told: set[tuple[str, str]] = set()  # who has told whom that something waits
        self.begun: set[tuple[str, str]] = set()  # instances and requests
        self.handed: set[str] = set()  # requests
        self.asked: tuple[str, str] | None = None  # a take that is being answered: from whom, and by whom
        self.died: set[str] = set()
        self.takes: set[tuple[str, str]] = set()  # that were not answered yet: by whom, and from whom

    def event(self, name: str, event: Value) -> None:
        self.asked = None
        if isinstance(event, Spare) and event.said == "take":
            self.asked = (name, event.name)
        elif isinstance(event, Spare) and event.said == "none":
            self.takes.discard((name, event.name))
        elif isinstance(event, Submit) and event.route:
            self.takes.discard((name, event.route[-1]))
        elif isinstance(event, (PeerUp, PeerDown, PeerSuspect, PeerLeaving)):
            self.takes.discard((name, event.name))

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Step):
            self.begun |= {(name, row.request) for row in command.encodes}
            self.begun |= {(name, row.request) for row in command.prefills}
        if not isinstance(command, Send):
            return
        if isinstance(command.message, Spare):
            self._says(name, command.to, command.message)
        elif isinstance(command.message, Submit) and (name, command.to) == self.asked:
            self._hands_over(name, command.message)

    def _says(self, name: str, to: str, word: Spare) -> None:
        assert word.name == name, f"{name} says {word}"
        if word.said in ("want", "take"):
            here = self.cores[name].state.requests
            assert not here, f"{name} says {word.said} to {to}, and has {sorted(here)}"
            waits = {source for who, source in self.takes if who == name}
            assert not waits, f"{name} says {word.said} to {to}, and waits for {waits}"
        if word.said in ("have", "take", "no") and not self.died & {name, to}:
            self._pairs((name, to) if word.said == "have" else (to, name), word)
        if word.said == "take":
            self.takes.add((name, to))
        elif word.said == "none":
            assert self.asked == (name, to), f"{name} says none to {to}, which has asked for nothing"
            self.asked = None

    def _pairs(self, pair: tuple[str, str], word: Spare) -> None:
        tells = word.said == "have"
        assert (pair in self.told) is not tells, f"{word} between {pair}, of {sorted(self.told)}"
        (self.told.add if tells else self.told.discard)(pair)

    def _hands_over(self, name: str, sent: Submit) -> None:
        request = sent.work.request
        assert (name, request) not in self.begun, f"{name} hands over {request}, which has begun"
        assert request not in self.handed, f"{name} hands over {request}, which was handed over before"
        assert request not in self.cores[name].state.requests, f"{name} hands over {request}, and has it"
        assert sent.work.deadline_s is None or sent.work.deadline_s >= 0.0, f"{sent} with time that is over"
        self.handed.add(request)
        self.asked = None

    def after_event(self, name: str) -> None:
        assert self.asked is None, f"{self.asked[0]} answers {self.asked[1]}, which takes work, nothing"

    def lost(self, name: str) -> None:
        self.died.add(name)
        self.takes = {pair for pair in self.takes if name not in pair}
        self.begun = {each for each in self.begun if each[0] != name}

    def at_end(self) -> None:
        for name, core in self.cores.items():
            waits = core.state.siblings.awaits
            assert not waits, f"{name} waits for what {waits} was to hand over"
