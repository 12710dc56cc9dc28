"""Checks of the messages between cores, one by one: migrations, cancels, tokens and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from trinity.core import InstanceCore
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.frontend.messages import Adopt
from trinity.core.messages import (
    FRONTEND,
    KV,
    PREEMPTED,
    STATE,
    Cancel,
    Collect,
    Commit,
    Emit,
    Fetched,
    Finished,
    Forget,
    Helped,
    Moved,
    Offer,
    Open,
    PeerDown,
    Pull,
    Pulled,
    Ready,
    Release,
    Send,
    Step,
    Submit,
    Value,
    Withdraw,
)
from trinity.core.values import MARK, is_frontend
from trinity.stage_kinds import feature_kinds

HELPS = {(before, said) for before in ("asked", "begun", "no") for said in ("begun", "ready", "no")} | {("ready", "no")}


def label_reader(owner: str, request: str) -> str:
    """Name a reader: by the request's id at the first front end, with the front end's name ahead of it elsewhere."""
    return request if owner == FRONTEND else f"{owner}/{request}"


@dataclass
class Transfer:
    """One offer, as seen from outside."""

    offer: Offer
    target: str
    layers: int = 1
    ready: set[object] = field(default_factory=set)  # parts; of KV (block, layer)
    asked: set[object] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    committed: bool = False
    outcome: str | None = None
    void: bool = False  # one of the two has died


def list_pieces(
    transfer: Transfer, layers: tuple[int, int] | None, blocks: tuple[int, int] | None
) -> list[tuple[int, int]]:
    """List the (block, layer) cells of a KV offer, all of them where None."""
    first, end = layers or (0, transfer.layers)
    start, stop = blocks or (0, len(transfer.offer.parts[0].blocks))
    return [(block, layer) for block in range(start, stop) for layer in range(first, end)]


class Conversation:
    """One Release per Offer, when nothing is in flight and all is there or given up; tokens and ends just once; no
    step or pull after a Cancel; a Forget for every instance that saw the request.

    A death ends the transfers from and to the instance without a Release, those that were offered before its source
    heard of the death included. A request may end without a Finished then, or with those of several instances.

    Each life of a request has a name of its own: it begins with the tokens that its reader has, and its reader gets
    tokens of the present attempt of the present one alone. What is over on an instance is an attempt, not what comes
    after it. A front end hears of its own requests alone. What a lost one owned may end anyhow;
    one that adopts it goes on behind the tokens that it was told of.
    """

    def __init__(self, cores: Mapping[str, InstanceCore]) -> None:
        self.cores = cores
        self.transfers: dict[str, Transfer] = {}
        self.submitted: dict[str, str] = {}  # front ends by reader
        self.encode_only: set[str] = set()
        self.aborted: set[str] = set()
        self.admitted: set[str] = set()
        self.sent_back: set[str] = set()  # preempted, and not taken in again: its reader left meanwhile
        self.visited: set[tuple[str, str]] = set()
        self.over: dict[tuple[str, str], int] = {}  # up to which attempt of a request one has done with it
        self.finished: Counter[str] = Counter()
        self.forgotten: Counter[tuple[str, str]] = Counter()
        self.emitted: dict[tuple[str, int], str] = {}  # and by whom
        self.offered_again: set[str] = set()  # as a target was lost, perhaps with its Release: two may decode
        self.cut: set[tuple[str, int]] = set()  # tokens of instances that died: another may send them again
        self.delivered: dict[str, list[int]] = {}
        self.readers: dict[tuple[str, int], str] = {}  # by owner and number, which all lives of a request have
        self.owners: dict[str, str] = {}  # of each life
        self.adopted: set[str] = set()  # of front ends that died, by the name that they have here
        self.gone: set[str] = set()  # front ends
        self.present: dict[str, str] = {}  # name of the present life of each
        self.begun: Counter[str] = Counter()  # tokens that each life began with
        self.attempts: dict[str, int] = {}  # the last one that its front end has sent of each life
        self.spoken: set[tuple[str, int, int]] = set()  # life, attempt and index of the tokens that were emitted
        self.ends: dict[str, End] = {}
        self.fetched: dict[str, tuple[str, str, Fetched]] = {}
        self.returned: set[str] = set()
        self.helps: dict[str, tuple[str, str, list[str]]] = {}  # helper, asker and what was said, by name
        self.deaths = 0
        self.silenced: set[str] = set()  # whose lease ran out: either side may end them, and the front end takes one

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Cancel) and event.request in self.cores[name].state.requests:
            self._ends(name, event.request)
        elif isinstance(event, Abort):
            self.aborted.add(label_reader(name, event.request))
        elif isinstance(event, Submit) and is_frontend(name):
            self.submitted[label_reader(name, event.work.request)] = name
        elif isinstance(event, Adopt):
            reader = label_reader(name, event.work.request)
            self.submitted[reader], self.delivered[reader] = name, list(event.tokens)
            self.adopted.add(event.work.request)
        elif (isinstance(event, Offer) and not event.moves) or (isinstance(event, Submit) and not event.asker):
            own = self.cores.get(name)
            here = own is None or event.target_epoch in (None, own.settings.epoch)
            if here and (own is None or event.work.owner in own.state.frontends):
                self.visited.add((name, event.work.request))
            if self.deaths and isinstance(event, Offer) and len(set(event.route)) < len(event.route):
                self.over.pop((name, event.work.request), None)  # as a Release was cut off: it may be decoded again
                self.cut |= {each for each in self.emitted if each[0] == event.work.request}
        elif isinstance(event, Ready) and event.again:
            transfer = self.transfers[event.id]
            transfer.asked -= set(list_pieces(transfer, event.layers, event.blocks))
        elif isinstance(event, PeerDown) and is_frontend(event.name):
            for request, state in self.cores[name].state.requests.items():
                if state.work.owner == event.name:
                    self._ends(name, request)
        elif isinstance(event, PeerDown):
            for transfer in self.transfers.values():
                transfer.void |= (transfer.offer.source, transfer.target) == (name, event.name)
            ends = {id: (holder, taker) for id, (holder, taker, _) in self.fetched.items()}
            self.returned |= {id for id, pair in ends.items() if pair == (name, event.name)}
        elif isinstance(event, Pulled) and event.offer in self.transfers:
            self.transfers[event.offer].running.remove(event.part)

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Send):
            self._send(name, command.to, command.message)
        elif isinstance(command, Pull):
            self._pulls(name, command)
        elif isinstance(command, Step):
            self._steps(name, command)
        elif isinstance(command, Collect):
            assert command.request in self.encode_only, f"{command} of a request that goes on"
        elif isinstance(command, Open):
            assert command.work.request not in self.encode_only, f"{command} of an encode-only request"
            there = not command.tokens or command.again or self._has_kv(name, command.work.request)
            assert there, f"{command} before all was there"
        elif isinstance(command, Deliver):
            self._delivers(name, command)
        elif isinstance(command, End):
            reader = label_reader(name, command.request)
            assert reader not in self.ends, f"{reader} ended twice"
            self.ends[reader] = command

    def lost(self, name: str) -> None:
        """Expect no end of what the instance had in hand, nor a Forget for what it knew."""
        self.deaths += 1
        self.cut |= {each for each, emitter in self.emitted.items() if emitter == name}
        self.gone |= {name} if is_frontend(name) else set()
        for transfer in self.transfers.values():
            if name in (transfer.target, transfer.offer.source):
                transfer.void = True
            if name == transfer.target:
                transfer.running.clear()
        self.visited = {each for each in self.visited if each[0] != name}
        self.over = {each: attempt for each, attempt in self.over.items() if each[0] != name}
        self.returned |= {id for id, (holder, taker, _) in self.fetched.items() if name in (holder, taker)}

    def after_event(self, name: str) -> None:
        """Do nothing: every rule here is about single messages."""

    def at_end(self) -> None:
        kept = [offer for offer, each in self.transfers.items() if each.outcome is None and not each.void]
        kept += [id for id in self.fetched if id not in self.returned]
        assert not kept, f"no Release of {kept}"
        hanging = {each for each, asked in self.submitted.items() if asked not in self.gone} - set(self.ends)
        assert not hanging, f"no end of {sorted(hanging)}"
        if not self.deaths:
            self._each_finished()
        missing = {each for each in self.visited - set(self.forgotten) if self.owners.get(each[1]) not in self.gone}
        assert not missing, f"no Forget for {sorted(missing)}"
        for request, end in self.ends.items():
            if end.reason in ("length", "stop") and request not in self.aborted:
                assert end.finished is not None
                found = len(self.delivered.get(request, ()))
                assert found == end.finished.count, f"{request}: tokens are missing at {end}"

    def _each_finished(self) -> None:
        twice = {request for request, count in self.finished.items() if count > 1} - self.silenced
        assert not twice, f"Finished again: {sorted(twice)}"
        assert set(self.finished) | self.sent_back == self.admitted, (
            f"Finished {self.finished} of {sorted(self.admitted)}"
        )

    def _send(self, name: str, to: str, message: Value) -> None:
        if is_frontend(to):
            self._check_owner(to, message)
        if isinstance(message, Helped) or (isinstance(message, Submit) and message.asker):
            self._helps(name, to, message)
        elif isinstance(message, Submit):
            self.admitted.add(message.work.request)
            self.sent_back.discard(message.work.request)
            if is_frontend(name):
                self._begins(name, message)
        elif isinstance(message, Finished) and message.reason == PREEMPTED:
            self.sent_back.add(message.request)
        elif isinstance(message, Finished):
            self.finished[message.request] += 1
            if message.failure is not None and message.failure.fields.get("cause") == "LeaseExpired":
                self.silenced.add(message.request)  # the silent one may come back, and hand it on until it hears
            else:
                self.over[name, message.request] = max(message.attempt, self.over.get((name, message.request), 0))
        elif isinstance(message, Moved) and message.start:  # a decode: its offer alone leaves nothing behind
            self.visited.add((name, message.request))
        elif isinstance(message, Forget):
            self.forgotten[to, message.request] += 1
        elif isinstance(message, Emit):
            self._once(name, [(request, index) for request, _, index, _ in message.rows()])
            self.spoken |= {(request, attempt, index) for request, attempt, index, _ in message.rows()}
        else:
            self._migrates(name, to, message)

    def _check_owner(self, to: str, message: Value) -> None:
        """Check that a front end hears of requests that it owns."""
        named: tuple[str, ...] = message.requests if isinstance(message, Emit) else (getattr(message, "request", ""),)
        others = {each: self.owners[each] for each in named if self.owners.get(each, to) != to}
        assert not others, f"{to} hears {message}, of requests of {others}"

    def _helps(self, name: str, to: str, message: Submit | Helped) -> None:
        """Follow an item that another instance encodes: ready but once. A recall may come ahead of it, or too late."""
        if isinstance(message, Submit):
            assert message.work.request not in self.helps, f"{message} again"
            self.helps[message.work.request] = (to, message.asker, ["asked"])
            return
        helper, asker, said = self.helps[message.help]
        assert (name, to) == (helper, asker), f"{name} answers {to} for {helper} and {asker}: {message}"
        assert (said[-1], message.said) in HELPS, f"{message} after {said}"
        said.append(message.said)

    def _begins(self, name: str, sent: Submit) -> None:
        life = sent.work.request
        assert sent.work.owner == name, f"{name} sends {sent} of {sent.work.owner}"
        assert self.owners.setdefault(life, name) == name, f"{name} calls a life {life}, as {self.owners[life]} does"
        asked = life.rpartition(MARK)[0]
        first = life if name == FRONTEND and asked not in self.adopted else label_reader(name, asked)
        reader = self.readers.setdefault((name, sent.work.number), first)
        assert reader not in self.ends, f"{sent} of a request that has ended"
        known = self.delivered.get(reader, [])
        assert list(sent.tokens) == known, f"{sent} with tokens {sent.tokens}, and its reader has {known}"
        assert sent.work.outputs == len(known), f"{sent} says that it has {sent.work.outputs} outputs"
        self.present[reader], self.begun[life], self.attempts[life] = life, len(known), sent.work.attempt
        self.encode_only |= {life} if sent.work.encode_only else set()

    def _once(self, name: str, emitted: Iterable[tuple[str, int]]) -> None:
        for each in emitted:
            twice = each in self.cut or (self.deaths and each[0] in self.offered_again)
            assert each not in self.emitted or twice, f"{name} emitted {each} again"
            self.cut.discard(each)
            follows = each[1] == self.begun[each[0]] or (each[0], each[1] - 1) in self.emitted
            assert follows, f"{name} emitted {each} out of order"
            self.emitted[each] = name

    def _migrates(self, name: str, to: str, message: Value) -> None:
        if isinstance(message, Offer):
            assert message.id not in self.transfers, f"{message.id} was offered before"
            assert message.source == name, f"{name} offers for {message.source}"
            self.offered_again |= {message.work.request} if message.route.count(name) > 1 else set()
            self.transfers[message.id] = Transfer(message, to, self._layers(name))
        elif isinstance(message, Ready):
            self._readies(message)
        elif isinstance(message, Commit):
            transfer = self.transfers[message.id]
            assert not transfer.committed, f"{message} again"
            whole = len(transfer.offer.parts)
            if transfer.offer.kind == KV:
                whole = len(list_pieces(transfer, None, None)) + bool(transfer.offer.state)
            assert message.ending or len(transfer.ready) == whole, f"{message} before every part is ready"
            transfer.committed = True
        elif isinstance(message, Fetched):
            assert message.id not in self.fetched, f"{message} again"
            if message.blocks:
                self.fetched[message.id] = (name, to, message)
        elif isinstance(message, (Release, Withdraw)) and message.id in self.fetched:
            self._returns(name, to, message)
        elif ends_lease_early(message):
            self.silenced.add(self.transfers[message.id].offer.work.request)
        elif isinstance(message, Release):
            self._releases(name, to, message)

    def _returns(self, name: str, to: str, message: Release | Withdraw) -> None:
        """Follow the end of a holder's lease, by its taker or by time; its taker may end an expired one too."""
        holder, taker, _ = self.fetched[message.id]
        if isinstance(message, Withdraw):
            assert (name, to) == (holder, taker), f"{name} takes back the lease {message.id} of {holder}"
            return
        assert (name, to) == (taker, holder), f"{name} releases {message.id} to {to}"
        assert message.id not in self.returned or self.deaths, f"{message} again"
        self.returned.add(message.id)

    def _readies(self, message: Ready) -> None:
        transfer = self.transfers[message.id]
        assert not transfer.committed, f"{message} after Commit"
        pieces: set[object] = set(message.parts)
        if message.state and transfer.offer.state:
            pieces = {STATE}
        elif transfer.offer.kind == KV:
            pieces = set(list_pieces(transfer, message.layers, message.blocks))
        if message.again:
            assert pieces & transfer.ready, f"{message} takes back what was never ready"
            transfer.ready -= pieces
        assert not transfer.ready & pieces, f"{message} names a part again"
        assert pieces, f"{message} says nothing"
        transfer.ready |= pieces

    def _layers(self, name: str) -> int:
        return self.cores[name].settings.layers if name in self.cores else 1

    def _releases(self, name: str, to: str, message: Release) -> None:
        transfer = self.transfers[message.id]
        assert transfer.outcome is None or transfer.void, f"{message.id} released twice"
        assert (name, to) == (transfer.target, transfer.offer.source), f"{name} releases {message.id} to {to}"
        assert not transfer.running, f"{message} while parts {transfer.running} are being pulled"
        transfer.outcome = message.outcome
        if message.outcome in ("pulled", "cached") and not transfer.offer.copies:
            came = self.deaths and self._came_otherwise(name, transfer)  # by way of an instance that was lost
            assert transfer.committed or transfer.void or came, f"{message} before Commit"
        if message.outcome == "cached":
            assert not transfer.asked, f"{message} although parts {transfer.asked} moved"

    def _came_otherwise(self, name: str, transfer: Transfer) -> bool:
        here = self.cores[name].state.requests.get(transfer.offer.work.request)
        return here is not None and (here.incoming is None or here.incoming.offer.id != transfer.offer.id)

    def _pulls_home(self, name: str, pull: Pull) -> None:
        """Check a pull of what a helper has leased to the asker, for a request that prefills there."""
        holder, taker, answer = self.fetched[f"{pull.offer}/{pull.part}"]
        if answer.kind == KV:  # by ``FetchRules``
            return
        assert (pull.source, name) == (holder, taker), f"{name} pulls what was not leased to it: {pull}"
        assert (pull.source_blocks, pull.kind) == (answer.blocks, answer.kind), f"{pull} of other blocks than {answer}"
        assert pull.kind in feature_kinds(), f"{pull} of what no encoder makes"
        assert not self._is_over(name, pull.request), f"{pull} after the request's end"
        assert "P" in self.cores[name].settings.roles, f"{name} does not read features in its own blocks: {pull}"
        assert len(pull.source_blocks) == len(pull.target_blocks) > 0, f"{pull} pairs no blocks"

    def _pulls(self, name: str, pull: Pull) -> None:
        if pull.offer not in self.transfers:
            self._pulls_home(name, pull)
            return
        transfer = self.transfers[pull.offer]
        part = transfer.offer.parts[0 if pull.kind in (KV, STATE) else pull.part]
        source, blocks = transfer.offer.source, transfer.offer.state if pull.kind == STATE else part.blocks
        if part.holder:
            source, _, answer = self.fetched[f"{pull.offer}/{pull.part}"]
            blocks = answer.blocks
        offered = (transfer.target, source, STATE if pull.kind == STATE else transfer.offer.kind)
        assert (name, pull.source, pull.kind) == offered, f"{name} pulls what was not offered to it: {pull}"
        assert not self._is_over(name, pull.request), f"{pull} after the request's end"
        assert transfer.outcome is None, f"{pull} after Release"
        pieces: set[object] = {STATE if pull.kind == STATE else pull.part}
        if pull.kind == KV:
            start = part.blocks.index(pull.source_blocks[0])
            pieces = set(list_pieces(transfer, pull.layers, (start, start + len(pull.source_blocks))))
        assert pieces <= transfer.ready - transfer.asked, f"{pull} is not ready or was asked before"
        assert len(pull.source_blocks) == len(pull.target_blocks) > 0, f"{pull} pairs no blocks"
        assert set(pull.source_blocks) <= set(blocks), f"{pull} reads beyond its part"
        transfer.asked |= pieces
        transfer.running.add(pull.part)

    def _steps(self, name: str, step: Step) -> None:
        rows = [row.request for row in step.prefills] + list(step.decodes)
        assert len(set(rows)) == len(rows), f"{name}: a request has two rows in {step}"
        assert rows or step.encodes, f"{name}: an empty step"
        for request in rows + [row.request for row in step.encodes]:
            assert not self._is_over(name, request), f"{name}: {step} includes {request} after its end"

    def _ends(self, name: str, request: str) -> None:
        """Expect no step or pull any more there of the attempt that an instance has. A later one may come."""
        self.over[name, request] = self.cores[name].state.requests[request].attempt

    def _is_over(self, name: str, request: str) -> bool:
        """True where an instance has done with the attempt of this request that it has; one that it has not counts."""
        state = self.cores[name].state.requests.get(request) if name in self.cores else None
        return (name, request) in self.over and (state is None or state.attempt <= self.over[name, request])

    def _has_kv(self, name: str, request: str) -> bool:
        return any(
            transfer.outcome in ("pulled", "cached")
            for transfer in self.transfers.values()
            if transfer.target == name and transfer.offer.work.request == request and transfer.offer.kind == "kv"
        )

    def _delivers(self, name: str, command: Deliver) -> None:
        request = label_reader(name, command.request)
        before = self.delivered.setdefault(request, [])
        assert request not in self.ends, f"a token of {request} after its end"
        assert command.index == len(before), f"{command}, expected index {len(before)}"
        life = self.present.get(request, request)
        spoken = (life, self.attempts.get(life, 0), command.index) in self.spoken
        assert spoken, f"{command} was not emitted by the present attempt of {life}"
        before.append(command.sampled.token)


def ends_lease_early(message: Value) -> TypeGuard[Withdraw]:
    """Test whether the message ends a lease that has expired, without a Release."""
    return (
        isinstance(message, Withdraw)
        and message.failure is not None
        and message.failure.fields.get("cause") == "LeaseExpired"
    )
