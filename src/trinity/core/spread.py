"""Spreads the media items of a request over several encoders (EPDServe 3.2.2, intra-request parallelism)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from trinity.core.life_names import name_help
from trinity.core.messages import MediaSpan, PeerUp, Send, Submit, Work
from trinity.core.routing.router import UNKNOWN_UNIT_S, Router
from trinity.stage_kinds import encoder_of, roles_of

LEAST_GAIN = 0.1  # of the seconds until all items are encoded: below it a request stays with one encoder


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
