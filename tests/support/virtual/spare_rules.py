"""Checks of what instances take from their siblings: who asks, who answers, and what is handed over or passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from trinity.core import InstanceCore
from trinity.core.instance.request_state import PASSED
from trinity.core.instance.state import State
from trinity.core.messages import (
    KV,
    WORK,
    Offer,
    PeerDown,
    PeerLeaving,
    PeerSuspect,
    PeerUp,
    Pull,
    Release,
    Send,
    Spare,
    Step,
    Submit,
    Value,
)


class Asked(NamedTuple):
    """A take that is being answered: from whom, by whom, and of which kind."""

    of: str
    by: str
    kind: str


@dataclass
class Taking:
    """A take without an answer, of a sibling; ``source``: who is to make the offer, once that is known."""

    of: str
    source: str = ""


@dataclass
class Passing:
    """An offer that its target has passed, as its source handles that: the sibling has had no answer yet."""

    source: str
    release: Release
    answers: list[Value] = field(default_factory=list)


class SpareRules:
    """Rules: what is handed over had not begun where it waited, is there no more, and is handed over once in each life.

    Nobody is told of work who does not want any, as far as was said, nor takes any while something is here or is to
    come; nor a decode without room for it. Each take has one answer, at once: a request, an offer that is passed, or
    none. Each word that something waits has one as well, where neither of the two has died: words of a former life may
    come to the next one. An offer is passed once, of which nothing was pulled; its source offers the very blocks to the
    sibling or elsewhere, and has one answer for the sibling.
    """

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self.cores = cores
        self.told: set[tuple[str, str, str]] = set()  # who has told whom that something waits, and of which kind
        self.begun: set[tuple[str, str]] = set()  # instances, and requests or offers
        self.handed: set[str] = set()  # requests
        self.offers: dict[str, Offer] = {}
        self.asked: Asked | None = None
        self.passing: Passing | None = None
        self.died: set[str] = set()
        self.takes: dict[tuple[str, str], Taking] = {}  # by whom, and of which kind

    def event(self, name: str, event: Value) -> None:
        self.asked = self.passing = None
        if isinstance(event, Spare):
            self._hears(name, event)
        elif isinstance(event, Submit) and event.route:
            self._came(name, WORK, event.route[-1])
        elif isinstance(event, Offer) and event.passed:
            self._came(name, KV if event.kind == KV else WORK, event.route[-2])
        elif isinstance(event, Release) and event.outcome == PASSED:
            self.passing = Passing(name, event)
        elif isinstance(event, (PeerUp, PeerDown, PeerSuspect, PeerLeaving)):
            for kind in (WORK, KV):
                self._came(name, kind, event.name)

    def _hears(self, name: str, word: Spare) -> None:
        taking = self.takes.get((name, word.kind))
        if word.said == "take":
            self.asked = Asked(name, word.name, word.kind)
        elif word.said == "sent" and taking is not None and taking.of == word.name:
            taking.source = word.source
            source = self.cores[name].state.router.peers.get(word.source)
            if source is None or source.epoch != word.epoch or word.source in self.cores[name].state.router.suspects:
                del self.takes[name, word.kind]
        elif word.said == "none" and taking is not None and taking.of == word.name:
            del self.takes[name, word.kind]
        elif word.said == "none":  # of a source: it does not know of which kind
            self.takes = {each: found for each, found in self.takes.items() if each[0] != name}

    def _came(self, name: str, kind: str, by: str) -> None:
        taking = self.takes.get((name, kind))
        if taking is not None and by in (taking.of, taking.source):
            del self.takes[name, kind]

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Step):
            self.begun |= {(name, row.request) for row in command.encodes}
            self.begun |= {(name, row.request) for row in command.prefills}
        elif isinstance(command, Pull):
            self.begun.add((name, command.offer))
        if not isinstance(command, Send):
            return
        message = command.message
        if isinstance(message, Spare):
            self._says(name, command.to, message)
        elif isinstance(message, Submit) and self.asked is not None and (name, command.to) == self.asked[:2]:
            self._hands_over(name, message)
        elif isinstance(message, Release) and message.outcome == PASSED:
            self._passes(name, command.to, message)
        elif isinstance(message, Offer):
            self._offers(name, command.to, message)

    def _says(self, name: str, to: str, word: Spare) -> None:
        assert word.name == name, f"{name} says {word}"
        if self.passing is not None and word.said == "none" and to == self.passing.release.to:
            self.passing.answers.append(word)
            return
        if word.said in ("want", "take"):
            self._may_want(name, to, word)
        if word.said in ("have", "take", "no") and not self.died & {name, to}:
            self._pairs((name, to, word.kind) if word.said == "have" else (to, name, word.kind), word)
        if word.said == "take":
            self.takes[name, word.kind] = Taking(to)
        elif word.said == "none":
            assert self.asked == Asked(name, to, word.kind), f"{name} says none to {to}, which has asked for nothing"
            self.asked = None

    def _may_want(self, name: str, to: str, word: Spare) -> None:
        s = self.cores[name].state
        waits = {kind: each for (who, kind), each in self.takes.items() if who == name}
        if word.kind == KV:
            problem = _find_want_of_room(s, word.blocks)
            assert not problem, f"{name} says {word} to {to}: {problem}"
            assert KV not in waits, f"{name} says {word} to {to}, and waits for {waits}"
        else:
            assert not s.requests, f"{name} says {word} to {to}, and has {sorted(s.requests)}"
            assert not waits, f"{name} says {word} to {to}, and waits for {waits}"

    def _pairs(self, pair: tuple[str, str, str], word: Spare) -> None:
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

    def _passes(self, name: str, source: str, sent: Release) -> None:
        offer, asked = self.offers[sent.id], self.asked
        kind = KV if offer.kind == KV else WORK
        assert asked is not None, f"{name} passes {sent} to {sent.to}, and nobody has asked"
        assert asked == Asked(name, sent.to, kind), f"{name} passes {sent} to {sent.to}, and {asked} was asked for"
        assert source == offer.source, f"{name} says {sent} to {source}"
        assert (name, sent.id) not in self.begun, f"{name} passes {offer}, of which it has pulled"
        assert offer.work.request not in self.cores[name].state.requests, f"{name} passes {offer}, and has it"
        first = not (offer.passed or offer.moves or offer.work.attempt or offer.work.alone)
        assert first, f"{name} passes {offer}, which is to stay"
        assert sent.waited_s >= 0.0, f"{name} says {sent}"
        self.asked = None

    def _offers(self, name: str, to: str, offer: Offer) -> None:
        self.offers[offer.id] = offer
        if not offer.passed:
            assert self.passing is None or self.passing.source != name, f"{name} offers {offer} as if it were the first"
            return
        passing = self.passing
        if passing is None:  # its target was lost after that
            return
        before = self.offers[passing.release.id]
        assert (offer.parts, offer.kind) == (before.parts, before.kind), f"{offer} is not what {before} was"
        assert offer.work.request == before.work.request, f"{offer} in place of {before}"
        passing.answers += [offer] if to == passing.release.to else []

    def after_event(self, name: str) -> None:
        assert self.asked is None, f"{self.asked[0]} answers {self.asked[1]}, which takes work, nothing"
        if self.passing is not None:
            found = self.passing.answers
            assert len(found) == 1, f"{name} answers {self.passing.release.to} with {found} for {self.passing.release}"
            self.passing = None

    def lost(self, name: str) -> None:
        self.died.add(name)
        self.takes = {(who, kind): each for (who, kind), each in self.takes.items() if name not in (who, each.of)}
        self.begun = {each for each in self.begun if each[0] != name}

    def at_end(self) -> None:
        for name, core in self.cores.items():
            waits = core.state.siblings.awaits
            assert not waits, f"{name} waits for what {waits} was to hand over"


def _find_want_of_room(s: State, blocks: int) -> str:
    """Say why a decode of so many blocks, and of one at least, could not begin; "" where it could."""
    if s.kv_offers:
        return f"{list(s.kv_offers)} wait for room"
    if s.preempted or s.paused or s.prefill_queue or s.migrated_queue:
        return "others wait for blocks"
    if s.reserved_as is not None:
        return "it is reserved"
    free, ahead = s.kv.available, len(s.decoding) if s.grows else 0
    return "" if max(1, blocks) <= free - ahead else f"{free} blocks are free"
