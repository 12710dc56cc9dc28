"""Algorithm 1 (TriInfer 4.2) as a pure function: chooses the rows of the next step, by the seconds that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from trinity.core.messages import Step
from trinity.errors import ConfigError
from trinity.errors.arguments import Number, Whole, check_arguments
from trinity.stage_kinds import DECODE, PREFILL, count_alone, encoder_of_media, stage_of

Policy = Literal["alg1", "time", "prefill_first"]
Order = Literal["fcfs", "sjf", "deadline"]
TTFT_SHARE = 0.5  # share of the TTFT bound that one batch may take: encode and prefill are at least two batches
# and of the TBT bound: what steps cost besides their forward, and rounding, must not push every gap over the bound
TBT_SHARE = 0.98
LEARN = 0.1  # weight of the newest step


class StepTime(Protocol):
    """Predicts the seconds of a step."""

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float: ...


@check_arguments
@dataclass(frozen=True)
class BatchRules:
    """Batching rules of an instance. The defaults are Algorithm 1; the rest are its ablations, run by the same code.

    - ``token_budget`` (tokens, 2048): prefill tokens and decodes of one step.
    - ``image_budget`` (visual tokens, 1): images of one step; whole images, always at least one.
    - ``policy`` ("alg1"): "alg1" counts against the budgets, "time" admits while ``cost`` predicts at most ``limit_s``,
      "prefill_first" decodes only where there is nothing to prefill or encode.
    - ``order`` ("fcfs"): of the waiting queue; "fcfs", "sjf" (shortest job first) or "deadline".
    - ``chunked`` (True): chunked prefill, prompts cut to the token budget.
    - ``limit_encodes`` (True): hold encodes to the image budget.
    - ``limit_decodes`` (True): an instance that decodes migrated requests takes no more of them than the token budget,
      which keeps a step within the TBT bound; else as many as its KV blocks hold. One over it slows all.
    - ``leading_text`` (True): where nothing else is to prefill or encode, prefill the text before a request's first
      image while its features are still to come, into the prefix cache. Only with ``chunked``.
    - ``limit_s`` (seconds, None) and ``cost`` (None): the longest step, and the prediction of its seconds, for "time".

    Raises ``ConfigError`` (``UnknownName``).
    """

    token_budget: Whole = 2048
    image_budget: Whole = 1
    policy: Policy = "alg1"
    order: Order = "fcfs"
    chunked: bool = True
    limit_encodes: bool = True
    limit_decodes: bool = True
    leading_text: bool = True
    limit_s: Number | None = None
    cost: StepTime | None = None

    def check_cost(self) -> None:
        """Raise ``ConfigError`` where the policy predicts and has nothing to predict with."""
        if self.policy == "time" and (self.cost is None or self.limit_s is None):
            raise ConfigError("policy 'time' needs cost= and limit_s=: give the pipeline an slo, which profiles them")


class PrefillView(NamedTuple):
    """A request in its prefill stage: positions [start, end) are left. ``blocks``: KV blocks to reserve first."""

    request: str
    start: int
    end: int
    atomic: tuple[tuple[int, int], ...] = ()
    blocks: int = 0


class LeadingChunk(NamedTuple):
    """``length`` positions of a request's leading text, from ``start`` on."""

    request: str
    start: int
    length: int


class EncodeView(NamedTuple):
    """A request in its encode stage: (item, visual tokens) left. ``blocks``: to reserve first, by kind.

    An item of no tokens is in the step of the one before it, whose count includes it: strips of one image.
    """

    request: str
    items: tuple[tuple[int, int], ...]
    blocks: Mapping[str, int] = MappingProxyType({})


class Outstanding(NamedTuple):
    """Rows running on the other lane of the instance (dual stream: the budgets hold jointly)."""

    decodes: int = 0
    prefill_tokens: int = 0
    media_tokens: int = 0


NOTHING = Outstanding()


@dataclass
class View:
    """Input of Algorithm 1. The waiting iterables are lazy, in queue order; ``free_*`` are available blocks.

    ``free_media``: those for features, by kind. ``find_leading``: finds leading text of at most this many tokens; None
    where none waits.
    """

    decoding: Sequence[str] = ()
    prefilling: Iterable[PrefillView] = ()
    encoding: Iterable[EncodeView] = ()
    new_prefills: Iterable[PrefillView] = ()
    new_encodes: Iterable[EncodeView] = ()
    free_kv: int = 0
    free_media: Mapping[str, int] = field(default_factory=dict)
    outstanding: Outstanding = NOTHING
    find_leading: Callable[[int], LeadingChunk | None] | None = None


@dataclass
class Batch:
    """The next step. ``prefills``: (request, start, length); ``encodes``: (request, items); ``admitted_*`` are new.

    ``leading``: text that is prefilled where nothing else is prefilled or encoded.
    """

    decodes: Sequence[str] = ()
    prefills: list[tuple[str, int, int]] = field(default_factory=list)
    encodes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    admitted_prefills: list[str] = field(default_factory=list)
    admitted_encodes: list[str] = field(default_factory=list)
    leading: LeadingChunk | None = None


def latency_bound(roles: str, ttft: float, tbt: float) -> float:
    """Algorithm 1, lines 1 to 4: α·TTFT where an instance does not decode (E, EP, P), or ``TBT_SHARE``·TBT."""
    bounds = {stage_of(letter).bound for letter in roles}
    return TBT_SHARE * tbt if "tbt" in bounds else TTFT_SHARE * ttft


def schedule(view: View, rules: BatchRules) -> Batch:
    """Algorithm 1 (TriInfer 4.2): decodes, then running prefills and encodes, then new ones within both budgets."""
    batch = Batch()
    room = _room(rules, view.outstanding)  # lines 5 and 6: budgets are searched at start-up
    if rules.policy != "prefill_first":
        _add_decodes(batch, room, view)
    _add_running(batch, room, view, rules)
    _admit_prefills(batch, room, view, rules)
    _admit_encodes(batch, room, view)
    if rules.policy == "prefill_first" and not batch.prefills and not batch.encodes:
        _add_decodes(batch, room, view)
    if view.find_leading is not None and not (batch.prefills or batch.encodes):  # beyond the paper's
        batch.leading = view.find_leading(room.token_room())
    return batch


def _add_decodes(batch: Batch, room: _Room, view: View) -> None:
    batch.decodes = view.decoding  # lines 7 to 9: every running decode is in the batch
    room.decodes += len(view.decoding)


def _add_running(batch: Batch, room: _Room, view: View, rules: BatchRules) -> None:
    for prefill in view.prefilling:  # lines 10 to 13
        _add_chunk(batch, room, prefill, rules)
    for encode in view.encoding:  # lines 14 to 16
        _add_items(batch, room, encode)


def _admit_prefills(batch: Batch, room: _Room, view: View, rules: BatchRules) -> None:
    free = view.free_kv
    if not room.token_room():
        return
    for prefill in view.new_prefills:  # lines 17 to 20; head-of-line blocking, nobody is skipped
        if prefill.blocks > free or not _add_chunk(batch, room, prefill, rules):
            break
        free -= prefill.blocks
        batch.admitted_prefills.append(prefill.request)
        if not room.token_room():
            break


def _admit_encodes(batch: Batch, room: _Room, view: View) -> None:
    free = dict(view.free_media)
    for encode in view.new_encodes:  # lines 21 to 24
        lacks = any(count > free.get(kind, 0) for kind, count in encode.blocks.items())
        if lacks or (encode.items and not _add_items(batch, room, encode)):
            break
        for kind, count in encode.blocks.items():
            free[kind] = free.get(kind, 0) - count
        batch.admitted_encodes.append(encode.request)


def _add_chunk(batch: Batch, room: _Room, prefill: PrefillView, rules: BatchRules) -> bool:
    left = prefill.end - prefill.start
    length = min(left, room.token_room())
    if not rules.chunked and length < left:
        length = left if not batch.prefills and length else 0
    if rules.chunked and length < left:
        length = _whole(prefill, length, forced=not batch.prefills)
    if length <= 0:
        return False
    room.prefill_tokens += length
    batch.prefills.append((prefill.request, prefill.start, length))
    return True


def _whole(prefill: PrefillView, length: int, forced: bool) -> int:
    """Move the chunk's end out of an atomic span (Gemma 3): before it, or behind it where nothing else runs."""
    end = prefill.start + length
    for start, stop in prefill.atomic:
        if start < end < stop:
            end = start if start > prefill.start or not (forced and length) else stop
    return end - prefill.start


def _add_items(batch: Batch, room: _Room, encode: EncodeView) -> bool:
    chosen: list[int] = []
    for item, tokens in encode.items:
        if tokens and not room.media_fits(tokens):
            break
        room.media_tokens += tokens
        chosen.append(item)
    if chosen:
        batch.encodes.append((encode.request, tuple(chosen)))
    return bool(chosen)


class _Room:
    """Rest of both budgets, counted (policies alg1 and prefill_first)."""

    def __init__(self, rules: BatchRules, outstanding: Outstanding) -> None:
        self.rules, self.outstanding = rules, outstanding
        self.decodes = self.prefill_tokens = self.media_tokens = 0

    def token_room(self) -> int:
        return max(0, self.rules.token_budget - self.decodes - self.prefill_tokens)

    def media_fits(self, tokens: int) -> bool:
        if not self.rules.limit_encodes or not self.media_tokens:
            return True
        return self.media_tokens + tokens <= self.rules.image_budget


class _TimeRoom(_Room):
    """Rest of the latency bound, predicted (policy time). An empty batch always admits one piece.

    One of decodes alone admits one item: where it does not fit beside them it would wait for as long as any decode.
    """

    def seconds(self, prefill_tokens: int, media_tokens: int = 0) -> float:
        assert self.rules.cost is not None
        other = self.outstanding
        return self.rules.cost.seconds(
            self.decodes + other.decodes,
            self.prefill_tokens + prefill_tokens + other.prefill_tokens,
            self.media_tokens + media_tokens + other.media_tokens,
        )

    def token_room(self) -> int:
        assert self.rules.limit_s is not None
        low, high = 0, super().token_room()
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= self.rules.limit_s else (low, middle - 1)
        alone = not (self.decodes or self.prefill_tokens or self.media_tokens)
        return max(low, 1) if alone else low

    def media_fits(self, tokens: int) -> bool:
        assert self.rules.limit_s is not None
        beside_decodes = not (self.prefill_tokens or self.media_tokens)
        return beside_decodes or self.seconds(0, tokens) <= self.rules.limit_s


def _room(rules: BatchRules, outstanding: Outstanding) -> _Room:
    return _TimeRoom(rules, outstanding) if rules.policy == "time" else _Room(rules, outstanding)


def units(step: Step) -> dict[str, int]:
    """Count the units of a step by stage: visual tokens of an encoder, prompt positions (P), decode rows (D)."""
    counted: dict[str, int] = {}
    for row in step.encodes:
        letter = encoder_of_media(row.span.kind).letter
        counted[letter] = counted.get(letter, 0) + row.span.tokens
    counted |= {PREFILL.letter: sum(row.length for row in step.prefills), DECODE.letter: len(step.decodes)}
    return {letter: count for letter, count in counted.items() if count}


class StepRates:
    """Predicts seconds of work per stage. ``per_unit`` seconds by letter; 0.0 of what was never seen."""

    def __init__(self, rules: BatchRules, roles: str) -> None:
        self._rules = rules
        self.per_unit = dict.fromkeys(roles, 0.0)

    def learn(self, step: Step, seconds: float) -> None:
        """Learn from a step of ``seconds``. A mixed step is shared among its stages by the rates known before."""
        if step.decodes and not (step.prefills or step.encodes):  # most steps
            self.learn_decodes(len(step.decodes), seconds)
        elif self._rules.cost is None and seconds > 0.0:
            self._learn_mixed(units(step), seconds)

    def learn_decodes(self, rows: int, seconds: float) -> None:
        """Learn from a step of ``seconds`` that only decoded."""
        if self._rules.cost is None and seconds > 0.0:
            old, new = self.per_unit[DECODE.letter], seconds / rows
            self.per_unit[DECODE.letter] = old + LEARN * (new - old) if old else new

    def _learn_mixed(self, counts: dict[str, int], seconds: float) -> None:
        known = self.per_unit
        expected = sum(known[letter] * count for letter, count in counts.items())
        for letter, count in counts.items():
            if not known[letter]:
                others = expected if len(counts) > 1 else 0.0
                known[letter] = max(seconds - others, seconds / (2 * len(counts))) / count
            else:
                known[letter] += LEARN * (known[letter] * seconds / expected - known[letter])

    def seconds(self, letter: str, count: int) -> float:
        """Predicted seconds of ``count`` units at a stage, alone and in steps no larger than the budget."""
        if self._rules.cost is None or not count:
            return self.per_unit[letter] * count
        budget = self._budget(letter)
        full, rest = divmod(count, budget) if letter != DECODE.letter else (0, count)
        return full * self._step(letter, budget) + (self._step(letter, rest) if rest else 0.0)

    def unit_seconds(self, letter: str) -> float:
        """Seconds that one more unit is expected to cost."""
        if self._rules.cost is None:
            return self.per_unit[letter]
        many = self._budget(letter)
        return self._step(letter, many) / many

    def _budget(self, letter: str) -> int:
        budget: int = getattr(self._rules, stage_of(letter).budget)
        return budget

    def _step(self, letter: str, count: int) -> float:
        assert self._rules.cost is not None
        return self._rules.cost.seconds(*count_alone(letter, count))
