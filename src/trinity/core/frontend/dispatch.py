"""Dispatch: sends requests to their first stage, spread over encoders or alone, lets them wait, or refuses them.

They wait for a stage that is away, for instances to be empty where they run isolated, for their turn after a loss, and
for inputs that are prepared again.

Reserved is a life of an instance, the next one of an instance that is away included: that comes up empty. The router
of every instance and of the front end knows (``PeerReserved``) and sends others past it; an instance takes a request
that runs alone only while it has no other, and no other beside it (``trinity.core.instance.front_ends``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from math import inf

from msgspec.structs import replace

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.resumption import find_cached, name_holder
from trinity.core.frontend.suspicion import Life
from trinity.core.frontend.turns import Alarms, Inputs, Turns
from trinity.core.messages import Failure, MediaSpan, PeerEmpty, PeerReserved, PeerUp, Send, Submit, Value, Work
from trinity.core.routing.router import UNKNOWN_UNIT_S, BadChoice, Router
from trinity.core.routing.stage_peers import needs
from trinity.core.values import name_help
from trinity.stage_kinds import DECODE, PREFILL, encoder_of, encoders, encoders_of, path_of, roles_of

AWAY_S = 10.0  # for an instance that is away, before one that others are at is emptied for it
EMPTY_POLL_S = 0.1  # between two looks at whether an instance has become empty
LEAST_GAIN = 0.1  # of the seconds until all items are encoded: below it a request stays with one encoder
ALONE_TEXT = "instances died while they had it, and none was free in time for it to run alone; try again in a while"
TURN_TEXT = "many requests go on after a loss just now, and its turn has not come in the time it may wait; try again"


def stages_of(work: Work) -> str:
    """Letters of the stages that a request may come to: its prefill looks for a D even where one token is left."""
    path = path_of(work)
    return path + DECODE.letter if path.endswith(PREFILL.letter) and work.max_tokens > 1 else path


class Isolation:
    """Reserves instances for ``ward``, the id of the request that runs alone or is to be next ("" for none).

    - ``places``: first epochs that are reserved, by instance.
    - ``said``: messages to every instance, in order. ``lifted``: others may go there again, and have not been told.
    """

    def __init__(self, router: Router, entries: Mapping[str, FrontendRequest]) -> None:
        self._router, self._entries = router, entries
        self.ward = ""
        self.places: dict[str, int] = {}
        self.said: list[PeerReserved] = []
        self.lifted = False
        self._empty: dict[str, int] = {}  # epochs of the places that have said so
        self._numbers: dict[str, int] = {}  # of the reservations
        self._count = 0

    def admits(self, entry: FrontendRequest, now: float) -> bool:
        """Reserve all that a request needs, unless another one runs alone; True once all of that is empty."""
        if self.ward not in ("", entry.id):
            return False
        work = entry.work
        fitting = {letter: list(self._router.holding(letter, work)) for letter in stages_of(work)}
        missing = [letter for letter in path_of(work) if not fitting[letter] and letter not in work.alone]
        if missing:  # nothing is kept empty meanwhile; what nobody could ever hold is refused
            self.lift(entry)
            return not any(any(self._router.holding(letter, work, lost=True)) for letter in missing)
        self.ward = entry.id
        taken, wanted = self._count_others(entry), dict[str, int]()
        for letter, found in fitting.items():
            if letter in work.alone or all(work.is_alone_at(peer.roles) for peer in found):
                able = {peer.name for lost in (False, True) for peer in self._router.holding(letter, work, lost)}
                place = None if able & wanted.keys() else self._choose(letter, entry, found, taken, now)
                if place is not None:
                    wanted[place.name] = place.epoch
        self._reserve(wanted)
        return all(name in self._router.peers and self._is_empty(name) for name in wanted)

    def _choose(
        self, letter: str, entry: FrontendRequest, fitting: list[PeerUp], taken: Mapping[str, int], now: float
    ) -> Life | None:
        """An instance that is empty, else the next life of one that is away, else the one that is emptied soonest."""
        order = sorted(fitting, key=lambda peer: (taken.get(peer.name, 0), peer.name not in self.places, peer.name))
        if order and not taken.get(order[0].name):
            return Life(order[0].name, order[0].epoch)
        away = list(self._router.holding(letter, entry.work, lost=True))
        if away and (not order or now < entry.suspicion.died_at + AWAY_S):
            last = entry.suspicion.deaths[-1].life.name
            chosen = min(away, key=lambda peer: (peer.name != last, peer.name))
            return Life(chosen.name, chosen.epoch + 1)
        held = [peer for peer in order if peer.name in self.places] or order
        return Life(held[0].name, held[0].epoch) if held else None

    def _count_others(self, entry: FrontendRequest) -> dict[str, int]:
        """Count the other requests that are at each instance, as far as is known."""
        found: dict[str, int] = {}
        for other in self._entries.values():
            place = other.place
            if place is not None and other is not entry:
                peer = self._router.peers.get(place.name)
                found[place.name] = found.get(place.name, 0) + (peer is not None and peer.epoch == place.epoch)
        return found

    def _roles(self, name: str) -> str:
        peer = self._router.peers.get(name) or self._router.lost.get(name)
        return peer.roles if peer is not None else ""

    def _is_empty(self, name: str) -> bool:
        return self._empty.get(name) == self._router.peers[name].epoch

    def _reserve(self, wanted: dict[str, int]) -> None:
        changed = [PeerReserved(name, at, False) for name, at in self.places.items() if wanted.get(name) != at]
        for name, at in wanted.items():
            if self.places.get(name) != at:
                self._count += 1
                self._numbers[name] = self._count
                changed.append(PeerReserved(name, at, True, self._count))
        for each in changed:
            self._router.reserve(each)
            self._empty.pop(each.name, None)
            self.lifted = self.lifted or not each.reserved
        self.said += changed
        self.places = wanted

    def reservations(self) -> list[PeerReserved]:
        """List what an instance that has come up has to hear: it may have heard what was meant for its former life."""
        over = [PeerReserved(name, 0, False) for name in self._numbers if name not in self.places]
        return over + [PeerReserved(name, at, True, self._numbers[name]) for name, at in self.places.items()]

    def note_empty(self, event: PeerEmpty) -> None:
        """Take an instance's word that nothing but what runs alone is or will be there."""
        if event.name in self.places and self._numbers[event.name] == event.number:
            self._empty[event.name] = event.epoch

    def announce(self) -> list[Value]:
        """Tell every instance what is reserved and what no longer is, before all else that follows from it."""
        said, self.said = self.said, []
        return [Send(name, message) for message in said for name in self._router.peers]

    def empty_places(self, entry: FrontendRequest) -> frozenset[Life]:
        """Find the lives of instances that have said that they are empty, for a request that is sent to run alone."""
        if entry.id != self.ward:
            return frozenset()
        said = {Life(name, at) for name, at in self._empty.items() if entry.work.is_alone_at(self._roles(name))}
        return frozenset(said)

    def lift(self, entry: FrontendRequest) -> None:
        """Let others go where this request ran alone."""
        if self.ward == entry.id:
            self._reserve({})
            self.ward, self.lifted = "", True


def find_malformed(work: Work, router: Router, known: bool) -> Failure | None:
    """Find a flaw that no instance could work on; ``known``: the request's id is in use."""
    if known:  # its reader may be gone, but steps in flight still end
        text = f"a request {work.request!r} is still being served or ended; wait, or use another request_id"
        return Failure("RequestError", text)
    several = encoders_of(work)
    if len(several) > 1:
        text = f"its media need the stages {' and '.join(several)}, and a request has one that encodes: send them apart"
        return Failure("RequestError", text)
    if work.encode_only and not (work.media and router.known(several)):
        letter = several or encoders()[0].letter
        text = f"the features of a request need at least one item of media, and an instance with stage {letter}"
        return Failure("RequestError", text)
    if not work.encode_only and (not work.prompt or work.max_tokens < 1):
        text = f"a prompt of {len(work.prompt)} tokens and an output of {work.max_tokens}; both need at least one"
        return Failure("RequestError", text)
    return None


def find_overload(waiting: int, most: int, waiting_bytes: int, input_bytes: int, most_bytes: int) -> Failure | None:
    """Refuse one more request where too many wait already, or too many bytes of their media and its own."""
    if waiting >= most:
        return Failure("Overloaded", f"{waiting} requests wait already; try later or raise max_waiting")
    if input_bytes > most_bytes:
        text = f"its media make {input_bytes} bytes, above max_waiting_bytes ({most_bytes})"
        return Failure("RequestTooLarge", f"{text}; send fewer or smaller media")
    if waiting_bytes + input_bytes > most_bytes:
        text = f"the media of requests that wait have {waiting_bytes} bytes already"
        return Failure("Overloaded", f"{text}; try later or raise max_waiting_bytes")
    return None


def find_misfit(router: Router, work: Work, losses: Mapping[str, str]) -> Failure | None:
    """Find a stage at which no instance can serve this request. ``Overloaded``: one could, but is away just now.

    losses: why each instance was lost last, by name.
    """
    missing = [letter for letter in path_of(work) if not router.can_serve(letter, work)]
    for letter in missing:  # first of all: what can never be served waits for nothing
        if not router.awaits(letter, work):
            return _too_large(router, work, letter)
    return Failure("Overloaded", _away(router, missing[0], losses), {"stage": missing[0]}) if missing else None


def _away(router: Router, letter: str, losses: Mapping[str, str]) -> str:
    """Name the instances of a stage that are away, and why."""
    gone = [peer.name for peer in router.lost.values() if letter in peer.roles]
    kept = [name for name, peer in router.peers.items() if letter in peer.roles and name in router.reserved]
    why = "; ".join(
        [f"{name} is started again: {losses.get(name) or 'it was lost'}" for name in gone]
        + [f"{name} is reserved for a request that runs alone" for name in kept]
    )
    return f"no instance is up at stage {letter} just now ({why}); try again in a while"


def _too_large(router: Router, work: Work, letter: str) -> Failure:
    """Failure that lists the blocks needed and the pool size of every instance with this stage."""
    found = []
    for peer in (*router.peers.values(), *router.lost.values()):
        if letter in peer.roles:
            need = needs(letter, work, peer.roles, peer.image_block_size, peer.kv_block_size)
            found += [f"{count} {kind} of {peer.pools.get(kind, 0)} in {peer.name}" for kind, count in need.items()]
    advice = "shorten the prompt or max_tokens, or enlarge the pools"
    if work.outputs:
        advice = f"it was preempted or lost, and its {work.outputs} outputs count as prompt; enlarge the pools"
    text = f"no instance can hold this request at stage {letter}; blocks that it needs of the pools: {', '.join(found)}"
    return Failure("RequestTooLarge", f"{text}; {advice}")


def send_spread(router: Router, first: str, sent: Submit, most: int) -> list[Send]:
    """Send a request to its first instance, and items of it to at most ``most - 1`` helpers."""
    helpers = deal_items(router, sent.work, first, most) if most > 1 else ()
    if not helpers:
        return [Send(first, sent)]
    asked: dict[str, int] = {}
    for item, span in enumerate(sent.work.media):
        if helpers[item]:
            asked.setdefault(span.content, item)
    lives = {name: router.peers[name].epoch for name in helpers if name}
    helps = [Send(helpers[item], _help(sent, item, first, lives[helpers[item]])) for item in asked.values()]
    return [Send(first, replace(sent, helpers=helpers)), *helps]


def _help(sent: Submit, item: int, asker: str, epoch: int) -> Submit:
    """The item as a request of its own, which ends with its features in the encoder cache of a helper's life."""
    name, media = name_help(sent.work.request, sent.work.attempt, item), (sent.work.media[item],)
    alone = replace(sent.work, request=name, media=media, prompt=(), encode_only=True)
    return Submit(alone, sent.inputs[item : item + 1], asker=asker, target_epoch=epoch)


def deal_items(router: Router, work: Work, first: str, most: int) -> tuple[str, ...]:
    """Name the helper of each media item, "" for none; () where all stay with ``first``.

    Largest items first, each to the encoder predicted to be through with it first; items of one content stay together.
    Encoders that would be busy until ``first`` is through with all items get none, nor do those that prefill or decode
    as well, unless they have nothing to do.
    """
    own = encoder_of(work)
    if work.encode_only or len(work.media) < 2 or own not in router.peers[first].roles:
        return ()
    new = {span.content: span for span in work.media if not router.holder(span, ())}
    idle = _find_idle(router, work, first, sum(span.tokens for span in new.values()))
    chosen = _deal(new, idle[:most], first)
    for content, name in chosen.items():
        router.count(name, own, new[content].tokens)
        router.count(first, own, -new[content].tokens)
    return tuple(chosen.get(span.content, "") for span in work.media) if chosen else ()


def _find_idle(router: Router, work: Work, first: str, tokens: int) -> list[tuple[float, float, str]]:
    """List encoders by the seconds of work that they have: these, seconds of a visual token, and name; first first."""
    peers = [peer for peer in router.trusted(_fitting_helpers(router, work)) if peer.name != first]
    names, own = [first, *(peer.name for peer in peers)], encoder_of(work)
    known = [router.loads[name].unit_s.get(own, 0.0) if name in router.loads else 0.0 for name in names]
    other = max(known) or UNKNOWN_UNIT_S  # of one that has encoded nothing yet
    units = [each or other for each in known]
    waits = [router.seconds(name, own) for name in names]
    waits[0] = max(0.0, waits[0] - _counted(work) * (known[0] or UNKNOWN_UNIT_S))  # which counts this request already
    alone = waits[0] + tokens * units[0]
    free = [each for each in zip(waits[1:], units[1:], names[1:], strict=True) if each[0] < alone - waits[0]]
    return [(waits[0], units[0], first), *sorted(free)]


def _fitting_helpers(router: Router, work: Work) -> Iterator[PeerUp]:
    """Encoders that may take an item of it, which is prefilled elsewhere. Those with further roles must be at rest."""
    for peer in router.fitting(encoder_of(work), replace(work, encode_only=True)):
        if roles_of(peer.roles).only_encodes or not any(router.seconds(peer.name, letter) for letter in peer.roles):
            yield peer


def _counted(work: Work) -> int:
    return sum(span.tokens for span in work.media)


def _deal(new: dict[str, MediaSpan], encoders: list[tuple[float, float, str]], first: str) -> dict[str, str]:
    """Deal contents to encoders. Returns the helper of each that does not stay; {} where that gains too little."""
    through = {name: wait for wait, _, name in encoders}
    units = {name: unit for _, unit, name in encoders}
    alone = through[first] + sum(span.tokens for span in new.values()) * units[first]
    chosen: dict[str, str] = {}
    for content, span in sorted(new.items(), key=lambda each: -each[1].tokens):
        name = min(through, key=lambda each: through[each] + span.tokens * units[each])
        through[name] += span.tokens * units[name]
        if name != first:
            chosen[content] = name
    used = max(through[name] for name in {first, *chosen.values()})
    return chosen if used <= (1 - LEAST_GAIN) * alone else {}


class Dispatch:
    """Sends a request, or notes that it waits.

    - ``retries``: turns of requests that go on after a loss, until they have a new token.
    - ``losses``: why each instance was lost last, by name.
    - ``spread``: encoders that may encode the media of one request.
    """

    def __init__(
        self,
        router: Router,
        requests: Sized,
        inputs: Inputs,
        isolation: Isolation,
        alarms: Alarms,
        failures: FailurePolicy,
        spread: int,
    ) -> None:
        self._router, self._requests, self._alarms = router, requests, alarms
        self._inputs, self._isolation = inputs, isolation
        self.failures, self.spread = failures, spread
        self.retries = Turns()
        self.losses: dict[str, str] = {}

    def start(self, entry: FrontendRequest, now: float) -> tuple[list[Value], Failure | None]:
        """Send a request to its first stage, or let it wait while it cannot be sent.

        Returns commands, and why it can neither be sent nor wait.
        """
        if now < entry.not_before:
            return [], self._wait_or_refuse(entry, now, _overloaded(ALONE_TEXT), entry.not_before - now)
        is_apart = self._is_apart(entry, now)
        said = self._isolation.announce() if entry.work.alone else []
        if not is_apart:
            pause_s = EMPTY_POLL_S if self._isolation.ward == entry.id else inf
            return said, self._wait_or_refuse(entry, now, _overloaded(ALONE_TEXT), pause_s)
        problem = find_misfit(self._router, entry.work, self.losses)
        if problem is not None:
            self.retries.leave(entry.id)
            if problem.error != "Overloaded" or self.failures.wait_s == 0:
                return said, problem
            return said, self._wait_or_refuse(entry, now, problem, EMPTY_POLL_S if entry.work.alone else inf)
        if not self._has_turn(entry):
            return said, self._wait_or_refuse(entry, now, _overloaded(TURN_TEXT))
        if entry.dropped and not entry.inputs:
            return said + self.prepare(entry, now), None
        try:
            return said + self._send(entry, now), None
        except BadChoice as choice:
            return said, Failure("StageError", str(choice))

    def _is_apart(self, entry: FrontendRequest, now: float) -> bool:
        """True unless it is to run alone, and what it needs for that is not reserved, up and empty yet."""
        suspected = entry.suspicion.stages(entry.delivered) if entry.is_suspect(self.failures) else ""
        alone = "".join(letter for letter in suspected if letter in stages_of(entry.work))
        if alone != entry.work.alone:
            entry.work = replace(entry.work, alone=alone)
        if not alone:
            self._isolation.lift(entry)
            return True
        self.retries.leave(entry.id)  # it waits for its place: a turn that came later would send it once more
        return self._isolation.admits(entry, now)

    def _has_turn(self, entry: FrontendRequest) -> bool:
        """True unless too many go on after a loss just now, or an older one waits to, or may soon.

        When an isolated request has got through, all that wait are tried next, the oldest first: none takes its turn
        before.
        """
        if not entry.former or self.failures.wait_s == 0:
            return True
        entry.watched = True
        if entry.work.alone:
            return True  # as only one does at a time
        if self._isolation.lifted and entry.id not in self.retries.active:
            return False
        return self.retries.take(entry.id, entry.work.number, self.failures.most_retries(len(self._requests)))

    def _send(self, entry: FrontendRequest, now: float) -> list[Send]:
        """Send it. Raises ``BadChoice`` where the routing policy names no instance that fits."""
        first = self._find_cached(entry) or self._router.enter(entry.work, entry.unfit_at)
        assert first is not None
        life = Life(first, self._router.peers[first].epoch)
        sent = Submit(entry.work, entry.inputs, tokens=tuple(entry.tokens), target_epoch=life.epoch)
        commands = send_spread(self._router, first, sent, 1 if entry.suspicion.row or entry.unfit_at else self.spread)
        entry.enter(life, now, self._isolation.empty_places(entry))
        entry.inputs = () if entry.dropped else entry.inputs
        return commands

    def _find_cached(self, entry: FrontendRequest) -> str | None:
        """Find who has most of a request that goes on, and need not compute it again; its work names who has more."""
        if not entry.former or entry.work.encode_only or entry.unfit_at:
            return None
        first = find_cached(self._router, entry.work, entry.tokens, entry.prefilled, entry.blamed)
        entry.work, first = name_holder(self._router, entry.work, entry.tokens, first, entry.blamed)
        return first

    def _wait_or_refuse(
        self, entry: FrontendRequest, now: float, problem: Failure, pause_s: float = inf
    ) -> Failure | None:
        if now >= entry.gives_up_at:
            return problem
        self.wait(entry, now, pause_s)
        return None

    def wait(self, entry: FrontendRequest, now: float, pause_s: float = inf) -> None:
        """Let it wait until an instance comes up, or for so long."""
        waited = entry.waits
        entry.wait(now, now + pause_s, self.failures.wait_s)
        if entry.dropped and not entry.inputs:
            self._inputs.free(entry)
        self._alarms.set(entry.retry_at, entry.id)
        if not waited:
            self._alarms.set(entry.gives_up_at, entry.id)

    def prepare(self, entry: FrontendRequest, now: float) -> list[Value]:
        """Let it wait until its inputs are prepared again."""
        self.wait(entry, now)
        return self._inputs.prepare(entry)

    def note_token(self, entry: FrontendRequest) -> None:
        """Note that this life of a request has a new token: it is like others, once it has got through its stage."""
        if not entry.watched or entry.delivered == entry.base:
            return
        self.retries.leave(entry.id)
        if not entry.work.alone or entry.suspicion.has_passed(entry.delivered):
            entry.watched = False
            entry.suspicion.get_through(alone=bool(entry.work.alone))
            self._isolation.lift(entry)

    def forget(self, entry: FrontendRequest) -> None:
        """Forget a request that has ended."""
        self._isolation.lift(entry)
        self.retries.leave(entry.id)


def _overloaded(text: str) -> Failure:
    return Failure("Overloaded", text)
