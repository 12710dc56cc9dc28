"""Refusals of the front end: requests that cannot be served, or not just now, with what to do in the error."""

from __future__ import annotations

from collections.abc import Mapping

from trinity.core.messages import Failure, Work
from trinity.core.routing.router import Router
from trinity.core.routing.stage_peers import needs
from trinity.stage_kinds import encoders, encoders_of, path_of


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
