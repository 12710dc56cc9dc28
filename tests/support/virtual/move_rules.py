"""Checks of decodes that move: who has the request, from the first offer to the answer that its reader gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from trinity.core import InstanceCore
from trinity.core.frontend import FrontendCore
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import REFUSED, UNPULLED
from trinity.core.messages import (
    Caught,
    Commit,
    Emit,
    Finished,
    Move,
    Moved,
    NotMoved,
    Offer,
    Pull,
    Pulled,
    Release,
    Send,
    Step,
    Submit,
    Value,
)

FrontEnds = FrontendCore | Mapping[str, FrontendCore]  # one, or all that live by name


def map_frontends(given: FrontEnds) -> Mapping[str, FrontendCore]:
    """Map the front ends by name."""
    return {given.name: given} if isinstance(given, FrontendCore) else given


@dataclass
class WatchedMove:
    """One offer of a decode that moves, as seen from outside."""

    source: str
    target: str
    request: str
    running: set[int] = field(default_factory=set)  # pulls
    spoilt: bool = False  # a pull has failed
    caught: bool = False  # the target has said so
    heard: bool = False  # the source has heard it, while the offer stood
    over: bool = False  # the source goes on itself
    taken: bool = False  # the target has taken it over


class MoveRules:
    """The source has no row of it while it is offered, and commits once, when its target has all and has said so.

    Until then the target speaks of it to nobody but its source, and has room for it or refuses. A refusal comes from
    one that has not taken it over. Blocks that go ahead are leased, and nobody decodes from them. No two cores decode
    one life of a request. Each ``MoveRequest`` has one ``MoveEnd``, and so has each move that the front end asks for by
    itself, which it does only of what decodes at an instance that leaves.
    """

    def __init__(self, cores: Mapping[str, InstanceCore], frontend: FrontEnds) -> None:
        self.cores, self.frontends = cores, map_frontends(frontend)
        self.moves: dict[str, WatchedMove] = {}
        self.committed: dict[tuple[str, str], WatchedMove] = {}  # by target and request: the last
        self.away: set[tuple[str, str]] = set()  # instances and requests that are offered by them, or went from there
        self.moved: set[str] = set()  # requests that were ever offered so
        self.asked: Counter[tuple[str, str]] = Counter()  # by front end and request
        self.copies: set[str] = set()  # offers ahead of moves

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, MoveRequest):
            self.asked[name, event.request] += 1
        elif isinstance(event, Submit):
            self.away.discard((name, event.work.request))
        elif isinstance(event, Pulled) and event.offer in self.moves:
            move = self.moves[event.offer]
            move.running.discard(event.part)
            move.spoilt |= event.failure is not None
        elif isinstance(event, Commit) and event.id in self.moves:
            self.committed[name, self.moves[event.id].request] = self.moves[event.id]
        elif isinstance(event, Caught):
            self.moves[event.id].heard |= event.id in self.cores[name].state.outgoing

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Send) and isinstance(command.message, Move):
            self._asks(name, command.to, command.message.request)
        elif isinstance(command, Send):
            self._send(name, command.message)
        elif isinstance(command, MoveEnd):
            self.asked[name, command.request] -= 1
            assert self.asked[name, command.request] >= 0, f"{command} of a move that nobody asked for"
        elif isinstance(command, Pull) and command.offer in self.moves:
            self.moves[command.offer].running.add(command.part)
        elif isinstance(command, Step):
            rows = {row.request for row in command.prefills} | set(command.decodes)
            assert not rows & (self.moves.keys() | self.copies), (
                f"{name}: {command} has a row of what is not its own yet"
            )
            gone = [row for row in rows if (name, row) in self.away]
            assert not gone, f"{name}: {command} has rows of {gone}, which are offered to another instance or gone"

    def _asks(self, name: str, source: str, life: str) -> None:
        request = self.frontends[name].reader_of(life)
        if not self.asked[name, request]:
            assert source in self.frontends[name].router.leaving, f"a move of {request} from {source}, which stays"
            self.asked[name, request] += 1

    def _send(self, name: str, message: Value) -> None:
        if isinstance(message, Offer):
            self._offers(name, message)
        elif isinstance(message, Caught):
            self._catches(name, self.moves[message.id], message)
        elif isinstance(message, Commit) and message.id in self.moves:
            move = self.moves[message.id]
            assert move.heard, f"{message} before its target had all, or after it was taken back"
            assert not move.over, f"{message} of what {name} goes on with"
        elif isinstance(message, Release) and message.id in self.moves:
            self._releases(self.moves[message.id], message)
        elif isinstance(message, NotMoved):
            self._goes_on(name, message)
        elif isinstance(message, Moved):
            self._takes_over(name, message)
        elif isinstance(message, (Finished, Emit)):
            named = {message.request} if isinstance(message, Finished) else set(message.requests)
            assert not named & (self.moves.keys() | self.copies), f"{name} says {message} of what is not its own yet"

    def _offers(self, name: str, offer: Offer) -> None:
        request = offer.work.request
        if offer.copies:
            self.copies.add(offer.id)
            return
        self.away.discard((name, request))
        if not offer.moves:
            return
        s = self.cores[name].state
        assert s.requests[request].phase is Phase.MOVING, f"{offer} of one that does not move"
        assert not s.in_step(request), f"{offer} while a step has a row of it"
        self.moves[offer.id] = WatchedMove(name, s.requests[request].target, request)
        self.away.add((name, request))
        self.moved.add(request)

    def _catches(self, name: str, move: WatchedMove, message: Caught) -> None:
        assert name == move.target, f"{name} says {message}, and {move.target} was offered it"
        assert not move.caught, f"{message} again"
        assert not move.running, f"{message} while pulls {move.running} run"
        assert not move.spoilt, f"{message} although a pull has failed"
        move.caught = True

    def _releases(self, move: WatchedMove, message: Release) -> None:
        refused = message.outcome in (REFUSED, UNPULLED)
        assert refused is not move.taken, f"{message}, and {move.target} {'had' if move.taken else 'had not'} taken it"

    def _goes_on(self, name: str, message: NotMoved) -> None:
        """Note that an instance goes on with what it was to hand on, if it has it."""
        state = self.cores[name].state.requests.get(message.request)
        if state is None or (name, message.request) not in self.away or state.phase is Phase.MOVING:
            return
        self.away.discard((name, message.request))
        for move in self.moves.values():
            move.over |= (move.source, move.request) == (name, message.request)

    def _takes_over(self, name: str, message: Moved) -> None:
        self.away.discard((name, message.request))
        if not message.start:
            return
        move = self.committed[name, message.request]
        assert move.caught, f"{message} before all of it was there"
        assert not move.over, f"{message} of what {move.source} goes on with"
        move.taken = True

    def lost(self, name: str) -> None:
        self.away = {each for each in self.away if each[0] != name}
        self.asked = Counter({each: count for each, count in self.asked.items() if each[0] != name})

    def after_event(self, name: str) -> None:
        if name not in self.cores:
            waits = {each for each, count in self.asked.items() if count}
            known = {owner: frontend.entries.values() for owner, frontend in self.frontends.items()}
            moving = {(owner, entry.id) for owner, entries in known.items() for entry in entries if entry.moving}
            assert waits == moving, f"moves of {waits} have no answer, and the front ends know of {moving}"
            assert all(self.asked[each] == 1 for each in waits), f"several moves at once: {self.asked}"
            return
        s = self.cores[name].state
        left = [request for request, state in s.decoding.items() if state.copy and state.copy not in s.outgoing]
        assert not left, f"{name}: {left} wait for a copy that is on its way to nobody"
        waiting = [request for request in s.kv_offers if request in self.moves]
        assert not waiting, f"{name}: {waiting} wait for room here, and hold blocks elsewhere"
        for request in s.decoding.keys() & self.moved:
            route = s.decoding[request].route
            others = [each for each, core in self.cores.items() if each != name and _decodes(core, request, route)]
            assert not others, f"{request} decodes at {name}, and at {others}"

    def at_end(self) -> None:
        waits = +self.asked
        assert not waits, f"no answer to moves of {sorted(waits)}"


def _decodes(core: InstanceCore, request: str, route: tuple[str, ...]) -> bool:
    """True where a request decodes that came this way as well.

    What a source offers once more, as a Release was cut off, came another way: two decode then (decision 0085).
    """
    state = core.state.requests.get(request)
    if state is not None and any(one != other for one, other in zip(state.route, route, strict=False)):
        return False
    return state is not None and state.ending is None and state.phase in (Phase.DECODING, Phase.MOVING)
