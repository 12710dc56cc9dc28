"""The target's side of a KV transfer: reserve at once, pull each piece as it is ready, measure what is exposed."""

from __future__ import annotations

from collections import deque
from typing import Any

from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import Incoming, RequestState
from trinity.core.instance.reservation import need, recomputable, spare
from trinity.core.instance.state import State
from trinity.core.messages import KV, Failure, Offer, Pull, Pulled, Ready
from trinity.core.migration.layer_blocks import Cells, Piece
from trinity.core.transfers import PullTimes, merged, overlap_ratio


def reserve_kv(s: State, state: RequestState, now: float) -> bool:
    """The whole need of a request that will decode here, less what is cached; False where it does not fit."""
    if len(s.decoding) + s.arriving[Phase.KV_PULL] >= s.settings.rules.token_budget:
        return False
    assert state.incoming is not None
    state.firm = s.grows and not recomputable(s, state.work)
    total = need(s, state, len(state.incoming.offer.parts[0].blocks))
    hits = s.kv.match(s.prefix_keys(state))
    if s.preempted or not s.kv.fits(total - len(hits) + spare(s), hits):
        return False
    s.kv.hold(hits)
    state.hold_kv(hits + s.allocate(KV, total - len(hits)), len(hits))
    incoming = state.incoming
    assert incoming is not None
    incoming.cells = Cells(len(incoming.offer.parts[0].blocks), s.settings.layers, len(hits))
    s.move(state, Phase.KV_PULL, now)
    return True


def ready_kv(incoming: Incoming, event: Ready, now: float) -> None:
    """Some more of it is ready. What was ready of the same blocks before and is void now need not be asked for.

    Where all layers of the last block come at once, prefill has ended: its Commit is the next message.
    """
    whole = event.blocks is None or event.blocks[1] == len(incoming.offer.parts[0].blocks)
    if event.layers is None and whole and not event.again:
        incoming.prefilled = now
    if event.again:
        incoming.doubts = [each for each in incoming.doubts if not _covers(event, each[0])]
        incoming.ready_kv = deque(each for each in incoming.ready_kv if each.blocks != event.blocks)
    incoming.ready_kv.append(event)


def ask_kv(s: State, state: RequestState, now: float) -> None:
    """Pull what is ready and not here. What is to come again waits until nobody reads the first version any more."""
    incoming = state.incoming
    assert incoming is not None
    cells = incoming.cells
    assert cells is not None
    while incoming.ready_kv and not (incoming.ready_kv[0].again and state.pulls):
        ready = incoming.ready_kv.popleft()
        if ready.again:
            cells.void(ready.blocks or (0, cells.blocks))
        piece = cells.ask(ready)
        incoming.firm = incoming.firm and ready.layers is None
        incoming.group = max(incoming.group, piece.layers[1] - piece.layers[0])
        if piece.cells:
            _pull(s, state, incoming, piece, now)


def _pull(s: State, state: RequestState, incoming: Incoming, piece: Piece, now: float) -> None:
    offer, span, number = incoming.offer, slice(*piece.blocks), len(incoming.asked)
    incoming.asked.add(number)
    incoming.running[number] = (piece, now)
    if not state.pulls:
        incoming.busy_since = now
    layers = None if piece.layers == (0, s.settings.layers) else piece.layers
    blocks = (offer.parts[0].blocks[span], state.kv[span])
    s.pull(state, Pull(offer.id, number, offer.source, KV, state.work.request, *blocks, offer.generation, layers))


def kv_pulled(s: State, state: RequestState, event: Pulled, now: float) -> Failure | None:
    """A piece has come, or failed to: the failure, unless what was read may be void and come again."""
    incoming = state.incoming
    assert incoming is not None
    assert incoming.cells is not None
    piece, since = incoming.running.pop(event.part)
    if not state.pulls:
        incoming.busy += now - incoming.busy_since
        incoming.last = now
    if event.record:
        _record(state, incoming, event.record)
    if event.failure is None:
        incoming.cells.arrived(piece)
        s.pull_times.setdefault(incoming.offer.source, PullTimes()).add(piece.cells, now - since)
    elif _may_come_again(incoming, event.failure, piece):
        incoming.cells.lost(piece)
        return None
    return event.failure


def _may_come_again(incoming: Incoming, failure: Failure, piece: Piece) -> bool:
    """A step that fails in its middle writes anew what we read; the source says so, if it is so, before its Commit."""
    if failure.fields.get("cause") != "IntegrityError" or incoming.firm:
        return False
    if any(_covers(each, piece) for each in incoming.ready_kv):
        return True
    if incoming.commit is None:
        incoming.doubts.append((piece, failure))
    return incoming.commit is None


def _covers(event: Ready, piece: Piece) -> bool:
    """Whether this says that the piece comes again."""
    blocks = event.blocks
    return event.again and blocks is not None and blocks[0] <= piece.blocks[0] and piece.blocks[1] <= blocks[1]


def _record(state: RequestState, incoming: Incoming, record: dict[str, Any]) -> None:
    """All pulls of a transfer are one line of the request's record."""
    if incoming.record:
        incoming.record.update(merged(incoming.record, record))
    else:
        incoming.record = {**record, "pulls": 1}
        state.record(incoming.record)


def kv_here(s: State, state: RequestState) -> bool:
    """Whether all of the KV is here; it may be matched as soon as it will not be written again."""
    incoming = state.incoming
    assert incoming is not None
    here = incoming.cells is not None and not incoming.cells.missing
    if here and not incoming.ready_kv and (incoming.firm or incoming.commit is not None):
        publish_kv(s, state, len(state.work.prompt))
    return here


def conclude_record(s: State, state: RequestState) -> None:
    """How much of the transfer ran while prefill did: exposed is what came after its end (EPD-Serve table 4)."""
    incoming = state.incoming
    assert incoming is not None
    assert incoming.cells is not None
    if not incoming.moved:
        state.record(nothing_moved(s, incoming.offer))
    elif incoming.record:
        assert incoming.prefilled is not None
        exposed = max(0.0, incoming.last - incoming.prefilled)
        incoming.record |= {
            "mode": s.settings.transfers.kv,
            "group": incoming.group,
            "blocks": incoming.cells.blocks - incoming.cells.cached,
            "busy_s": incoming.busy,
            "exposed_s": exposed,
            "overlap": overlap_ratio(exposed, incoming.busy),
        }


def nothing_moved(s: State, offer: Offer) -> dict[str, Any]:
    """The record of a transfer that the target's caches made needless."""
    names = {"kind": offer.kind, "source": offer.source, "target": s.settings.name}
    return {**names, "outcome": "cached", "bytes": 0, "blocks": 0, "seconds": 0.0}


def publish_kv(s: State, state: RequestState, tokens: int) -> None:
    """Make the full blocks of the first ``tokens`` prompt positions matchable."""
    if not s.settings.prefix_cache:
        return
    keys = s.prefix_keys(state)
    for index in range(state.published, min(tokens // s.settings.kv_block_size, len(keys))):
        s.kv.publish(state.kv[index], keys[index])
        state.published = index + 1
