"""Cores as tables: one event a row, beside it every command that must answer, each in one short line.

A media block holds 4 rows and a KV block 4 tokens throughout; ``work("r", 3, "cat*6", 2)`` is a prompt of three
text tokens, an image "cat" of six visual tokens, and two text tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from support.virtual.checks import check_forgotten, check_state
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Deliver, End, FrontendCore, FrontendOptions
from trinity.core.frontend.messages import MoveEnd, Prepare
from trinity.core.instance.state import Settings
from trinity.core.messages import (
    IMAGE,
    KV,
    Cancel,
    Caught,
    Close,
    Collect,
    Commit,
    Emit,
    Failure,
    Finished,
    Forget,
    Gone,
    Grow,
    Helped,
    MediaSpan,
    Move,
    Moved,
    NotMoved,
    Offer,
    Open,
    Part,
    PeerEmpty,
    PeerLoad,
    PeerReserved,
    PeerUp,
    Pull,
    Pulled,
    Ready,
    Release,
    Sampled,
    Send,
    Spare,
    Step,
    Stepped,
    Submit,
    Value,
    Withdraw,
    Work,
)
from trinity.core.prefix_cache import DIGEST, media_keys, prefix_keys
from trinity.core.routing.router import RoundRobin, RoutingPolicy
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import NotTaken

Row = tuple[Value, list[str]]
Message = TypeVar("Message", bound=Value)
PLACEHOLDER = 9


def work(request: str, *pieces: int | str, text: int = 100, atomic: bool = False, **fields: Any) -> Work:
    """Pieces: a number of text tokens (their ids follow from ``text`` and their place), or an image "name*rows"."""
    prompt: list[int] = []
    media: list[MediaSpan] = []
    for piece in pieces:
        if isinstance(piece, int):
            prompt += range(text + len(prompt), text + len(prompt) + piece)
        else:
            name, _, rows = piece.partition("*")
            count = int(rows or 4)
            media.append(MediaSpan("image", count, len(prompt), count, name, atomic))
            prompt += [PLACEHOLDER] * count
    fields.setdefault("max_tokens", 3)
    return Work(request=request, prompt=tuple(prompt), media=tuple(media), **fields)


def make_core(
    name: str, image: int = 8, kv: int = 16, peers: str = "", policy: RoutingPolicy | None = None, **settings: Any
) -> InstanceCore:
    """A core such as "EP0"; ``peers`` are the others that it knows, such as "P0 D0 D1", each with large pools."""
    roles = name.rstrip("0123456789")
    pools = {"image": image} if set(roles) & set("EP") else {}
    pools |= {"kv": kv} if set(roles) & set("PD") else {}
    settings.setdefault("rules", BatchRules(token_budget=64, image_budget=64))
    settings.setdefault("transfers", TransferPolicy(early=False))  # offers ahead of encoding have tables of their own
    core = InstanceCore(Settings(name, roles, pools, image_block_size=4, kv_block_size=4, **settings), policy)
    for peer in [*peers.split(), name]:
        core.handle(peer_up(peer) if peer != name else core.announcement(), 0.0)
    return core


def peer_up(name: str, image: int = 99, kv: int = 99) -> PeerUp:
    return PeerUp(name, name.rstrip("0123456789"), 0, {"image": image, "kv": kv}, 4, 4)


def table(core: InstanceCore, rows: Iterable[Row], start: float = 0.0) -> None:
    """Every row's event is answered by just these commands; the books are right after each."""
    for number, (event, expected) in enumerate(rows):
        found = brief(core.handle(event, start))
        assert found == expected, f"row {number}, {event}: {found}"
        check_state(core.state)


def sent(commands: Sequence[Value], kind: type[Message]) -> list[Message]:
    """The messages of this kind, in full."""
    return [each.message for each in commands if isinstance(each, Send) and isinstance(each.message, kind)]


def emptied(core: InstanceCore) -> None:
    """Nothing of any request is left."""
    check_forgotten(core.settings.name, core.state)
    core.check()
    assert core.idle()


def emitted(*rows: tuple[str, int, int, Sampled]) -> Emit:
    """Rows as columns: request, attempt, index, what was sampled."""
    requests, attempts, indices, sampled = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Emit(requests, attempts, indices, sampled)


def done(step: int, lane: str = "joint", /, **tokens: int) -> Stepped:
    """Step ``step`` ended and gave these tokens."""
    return Stepped(step, lane, {request: Sampled(token) for request, token in tokens.items()})


def broken(step: int, *requests: str, **tokens: int) -> Stepped:
    """Step ``step`` ended, and these requests' rows failed."""
    failed = {request: Failure("StageError", f"{request} broke") for request in requests}
    return Stepped(step, "joint", {request: Sampled(token) for request, token in tokens.items()}, failed)


def lost(offer: str, part: int = 0) -> Pulled:
    """A pull failed."""
    return Pulled(offer, part, Failure("MigrationError", "lost"))


def image_offer(id: str, of: Work, *parts: tuple[int, ...], route: tuple[str, ...] = ("E0",)) -> Offer:
    return Offer(id=id, kind="image", source="E0", work=of, parts=tuple(Part(part) for part in parts), route=route)


def kv_offer(id: str, of: Work, blocks: tuple[int, ...], source: str = "P0") -> Offer:
    return Offer(id=id, kind="kv", source=source, work=of, parts=(Part(blocks),), route=(source,))


def brief(commands: Sequence[Value]) -> list[str]:
    """Moved, which only tells the front end where a request is, has tests of its own and would be in every table."""
    said = [each for each in commands if not (isinstance(each, Send) and isinstance(each.message, Moved))]
    return [_line(command) for command in said]


def _line(value: Value) -> str:
    if isinstance(value, Send):
        return f"{value.to}: {_message(value.message)}"
    if isinstance(value, Step):
        return _step(value)
    if isinstance(value, Pull):
        blocks = f"{_numbers(value.source_blocks)} into {_numbers(value.target_blocks)}"
        layers = f" layers {_numbers(value.layers)}" if value.layers else ""
        return f"pull {value.offer}.{value.part} {value.kind} of {value.request} from {value.source} {blocks}{layers}"
    if isinstance(value, Open):
        images = f" images {''.join(f'[{_numbers(each)}]' for each in value.images)}" if value.images else ""
        cached = f" cached {value.cached}" if value.cached else ""
        tokens = f" after {_numbers(value.tokens)}" if value.tokens else ""
        return f"open {value.work.request} kv {_numbers(value.blocks)}{images}{cached}{tokens}"
    if isinstance(value, Grow):
        return "grow " + ", ".join(f"{request} {_numbers(blocks)}" for request, blocks in value.blocks.items())
    if isinstance(value, Collect):
        items = "".join(f"[{_numbers(blocks)} of {rows} rows]" for blocks, rows in value.items)
        return f"collect {value.request} {items}"
    if isinstance(value, Close):
        return f"close {value.request}"
    if isinstance(value, Prepare):
        return f"prepare {value.life}"
    if isinstance(value, Deliver):
        return f"deliver {value.request}#{value.index}={value.sampled.token}"
    if isinstance(value, MoveEnd):
        return f"{value.request} {'is not moved: ' + value.failure.fields['reason'] if value.failure else 'is moved'}"
    assert isinstance(value, End)
    return f"end {value.request} {value.reason}{f' {value.failure.error}' if value.failure else ''}"


def _message(value: Value) -> str:
    if isinstance(value, Offer):
        parts = "".join(f"[{_numbers(part.blocks)}]" for part in value.parts)
        return f"offer {value.id} {value.kind} of {value.work.request} {parts} by way of {' '.join(value.route)}"
    if isinstance(value, Ready):
        layers = f" layers {_numbers(value.layers)}" if value.layers else ""
        blocks = f" blocks {_numbers(value.blocks)}" if value.blocks else ""
        return f"ready {value.id} {_numbers(value.parts)}{layers}{blocks}{' again' if value.again else ''}"
    if isinstance(value, Commit):
        cached = f" cached {value.cached_tokens}" if value.cached_tokens else ""
        after = f" after {_numbers(value.tokens)}" if value.tokens else ""
        return f"commit {value.id}{after}{cached}{f' ending {value.ending}' if value.ending else ''}"
    if isinstance(value, Release):
        return f"release {value.id} {value.outcome}"
    if isinstance(value, Withdraw):
        return f"withdraw {value.id}{f' {value.failure.error}' if value.failure else ''}"
    if isinstance(value, Emit):
        return "emit " + " ".join(f"{request}#{index}={sampled.token}" for request, _, index, sampled in value.rows())
    if isinstance(value, Finished):
        failed = f" {value.failure.error}" if value.failure else ""
        return f"finished {value.request} {value.reason} {value.count} by way of {' '.join(value.route)}{failed}"
    if isinstance(value, Submit):
        left = f" left to {','.join(each or '-' for each in value.helpers)}" if value.helpers else ""
        return f"submit {value.work.request}{left}{f' for {value.asker}' if value.asker else ''}"
    if isinstance(value, Spare):
        return f"spare {value.said}"
    if isinstance(value, Helped):
        return f"helped {value.help} {value.said}"
    if isinstance(value, Gone):
        return f"gone {value.request} with {value.to}"
    if isinstance(value, Caught):
        return f"caught {value.id}"
    if isinstance(value, Move):
        return f"move {value.request} to {value.to}"
    if isinstance(value, NotMoved):
        return f"not moved {value.request} {value.failure.fields['reason']}"
    if isinstance(value, PeerReserved):
        return f"{'reserve' if value.reserved else 'open'} {value.name}.{value.epoch}"
    if isinstance(value, PeerEmpty):
        return f"empty {value.name}.{value.epoch} of {value.number}"
    if isinstance(value, NotTaken):
        return f"not taken {value.request}"
    if isinstance(value, PeerLoad):
        return f"load up to {value.newest}"
    assert isinstance(value, Cancel | Forget)
    return f"{type(value).__name__.lower()} {value.request}"


def _step(step: Step) -> str:
    rows = [f"encode {row.request}.{row.item} into {_numbers(row.blocks)}" for row in step.encodes]
    for row in step.prefills:
        rows.append(f"prefill {row.request} {row.start}+{row.length}{' last' if row.last else ''}")
    rows += [f"decode {' '.join(step.decodes)}"] if step.decodes else []
    return f"step {step.id} {step.lane}: {', '.join(rows)}"


def _numbers(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def holding(name: str, of: Work, *kinds: str) -> PeerLoad:
    """It says that it has the media, the prompt, or both cached."""
    cached = {}
    if IMAGE in kinds:
        cached[IMAGE] = b"".join(key[:DIGEST] for span in of.media for key in media_keys(span, 4))
    if KV in kinds:
        cached[KV] = b"".join(key[:DIGEST] for key in prefix_keys(of.prompt, of.media, 4))
    return PeerLoad(name, cached=cached)


def make_frontend(peers: str = "E0 P0 D0", **fields: Any) -> FrontendCore:
    core = FrontendCore(RoundRobin(), FrontendOptions(**{"failures": NO_RECOVERY, **fields}))
    for peer in peers.split():
        core.handle(peer_up(peer), 0.0)
    return core
