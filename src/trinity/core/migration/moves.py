"""Moves a decode to another instance between two steps (stop and copy): its row leaves the batch, its KV is leased.

The target takes it only if it has room at once, pulls all of its KV, and says so (``Caught``). Until then the request
is the source's: it keeps row, blocks and tokens, and decodes on where the target refuses, fails, is late or is lost. At
the target it has the name of its offer till then, so that whatever else comes of the request meets nothing of it there.
With Commit it is the target's, as after a prefill. Nobody waits for room while it holds blocks: two instances that move
decodes to each other cannot wait for each other (decision 0078).
"""

from __future__ import annotations

from trinity.core.instance.lifecycle import end
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import REFUSED, UNPULLED, Lease, RequestState
from trinity.core.instance.state import State, failure
from trinity.core.messages import KV, Caught, Failure, Move, NotMoved, Part, Withdraw
from trinity.core.migration.source import announce, commit, drop_copy, drop_offer, lend_copy, lend_to
from trinity.core.values import blocks_for
from trinity.stage_kinds import DECODE

WORTH_COPYING_S = 0.01  # of a pull that is worth to go ahead of a move
LATE, LOST, STAYED = "late", "lost", "not decoding"
TEXTS = {
    REFUSED: "has no room for the request just now",
    UNPULLED: "could not pull the request's blocks",
    LATE: "did not have the request's blocks in time (TransferPolicy.move_s)",
    LOST: "is not up",
    STAYED: "does not get the request, which is recomputed",
}


def handle_move(s: State, event: Move, now: float) -> None:
    """Take the request out of the batch. Its KV is offered once no step has a row of it (``offer_moves``)."""
    problem = _find_problem(s, event)
    if problem is not None:
        s.send(event.owner, NotMoved(event.request, event.attempt, problem))
        return
    state = s.requests[event.request]
    state.target = event.to
    full = (len(state.work.prompt) + len(state.tokens) - 1) // s.settings.kv_block_size
    if is_worth_copying(s, full):
        lend_copy(s, state, now, event.to, full)
    else:
        s.move(state, Phase.MOVING, now)


def is_worth_copying(s: State, blocks: int) -> bool:
    """True where so many full blocks move to the target's prefix cache ahead of the request (``TransferPolicy``)."""
    mode, cost = s.settings.transfers.precopy, s.pull_cost
    if mode == "off" or not blocks or not s.settings.prefix_cache:
        return False
    return mode == "on" or (cost is not None and cost[0] + cost[1] * s.settings.layers * blocks >= WORTH_COPYING_S)


def finish_copy(s: State, lease: Lease, now: float, outcome: str) -> None:
    """Begin the move that a copy went ahead of, if the request still decodes; else it stays."""
    state = s.requests.get(lease.request)
    if state is None or state.copy != lease.id:
        return
    drop_copy(state)
    if state.ending is not None:
        return
    if state.phase is Phase.DECODING and outcome in ("pulled", "cached"):
        s.move(state, Phase.MOVING, now)
    else:
        reason = outcome if state.phase is Phase.DECODING else STAYED
        s.send(state.work.owner, NotMoved(state.work.request, state.attempt, _stays(s, lease.target, reason)))


def _find_problem(s: State, event: Move) -> Failure | None:
    """Tell why the request cannot move; None where it can."""
    state, name = s.requests.get(event.request), s.settings.name
    if state is None or state.attempt != event.attempt or state.ending is not None:
        return failure("MoveError", f"the request is not at {name} any more, or not yet", reason=STAYED)
    if state.phase is not Phase.DECODING or state.copy:
        return failure("MoveError", f"the request does not decode: it {state.phase.value}", reason=STAYED)
    return None if _is_up(s, state, event.to) else _stays(s, event.to, LOST)


def _is_up(s: State, state: RequestState, target: str) -> bool:
    return any(peer.name == target != s.settings.name for peer in s.router.fitting(DECODE.letter, state.work))


def _stays(s: State, target: str, reason: str) -> Failure:
    """Failure of a move to this target, which leaves the request here."""
    text = f"{target} {TEXTS.get(reason, TEXTS[REFUSED])}: it goes on at {s.settings.name}"
    return failure("MoveError", text, reason=reason)


def offer_moves(s: State, now: float) -> None:
    """Offer the KV of those whose last step here has ended: of all its tokens but the last, which has none yet."""
    for request, state in list(s.moving.items()):
        if state.outgoing is None and not s.in_step(request):
            _offer(s, state, now)


def _offer(s: State, state: RequestState, now: float) -> None:
    state.leave_decode_batch()
    if not _is_up(s, state, state.target):
        give_up(s, state, now, state.target, LOST)
        return
    written = len(state.work.prompt) + len(state.tokens) - 1
    size = s.settings.kv_block_size
    part = Part(state.block_table[: blocks_for(written, size)], tail=written % size)
    lend_to(s, state, now, state.target, KV, (part,))
    s.watch_lease(now, s.settings.transfers.move_s)
    announce(s, state, (0,))


def handle_caught(s: State, event: Caught, now: float) -> None:
    """Hand the request over: its target has all of its KV. One that is not offered any more is to be let go of.

    A target may have an offer that was given up with its former life: nothing else would tell it.
    """
    lease = s.outgoing.get(event.id)
    state = s.requests.get(lease.request) if lease is not None else None
    s.renew_leases(event.target, now)
    if lease is None or state is None or state.outgoing != event.id or state.ending is not None:
        s.send(event.target, Withdraw(event.id))
        return
    s.leave_tombstone(state, lease.target)
    commit(s, state, now)


def give_up(s: State, state: RequestState, now: float, target: str, reason: str) -> None:
    """Go on without a target that gave up its offer: a decode that was to move goes on here, any other request ends."""
    if state.phase is not Phase.MOVING or state.ending is not None:
        end(s, state, now, "cancelled")
        return
    drop_offer(state)
    s.start_decoding(state, now)
    s.send(state.work.owner, NotMoved(state.work.request, state.attempt, _stays(s, target, reason)))
