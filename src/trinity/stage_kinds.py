"""Lists the stages of a request in one table, and answers from it what an instance with given roles does.

An entry says what a stage needs and makes, which requests need it, what bounds its batch and what it costs. Code that
needs a property of roles (whether they decode, which blocks they hold) asks here; to add a stage is to add an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

IMAGE, KV, STATE = "image", "kv", "state"  # the kinds of block that the built-in stages make
KindOfWork = Literal["decodes", "prefill", "media"]
KINDS_OF_WORK: tuple[KindOfWork, ...] = ("decodes", "prefill", "media")  # of a step, in the order of its cost's counts


class Item(Protocol):
    """A media item of a request, as far as stages differ by it."""

    @property
    def kind(self) -> str: ...


class StagedRequest(Protocol):
    """A request, as far as its stages depend on it."""

    @property
    def media(self) -> Sequence[Item]: ...
    @property
    def encode_only(self) -> bool: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def outputs(self) -> int: ...


@dataclass(frozen=True)
class StageKind:
    """One stage.

    - ``letter``, ``name``: as placements and people write it.
    - ``work``: what its rows of a step are, by which it is profiled and priced (``StepCost`` has a curve for each).
    - ``part``: part of the model whose weights it runs, and with two lanes the lane of its steps.
    - ``needs``, ``makes``: kinds of block that it reads and writes; it pulls what another instance has made.
    - ``budget``: field of ``BatchRules`` that bounds its batch. ``bound``: field of the SLO that a step must keep.
    - ``unit``: what its batch counts, in words.
    - ``media`` (None): kinds of media that it encodes; () for all that no other stage names, None for a stage without.
    - ``needed_by`` (every one): which requests, of those that have such media, do not skip it.
    """

    letter: str
    name: str
    work: KindOfWork
    part: Literal["vision", "language"]
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    budget: Literal["image_budget", "token_budget"]
    bound: Literal["ttft", "tbt"]
    unit: str
    media: tuple[str, ...] | None = None
    needed_by: Callable[[StagedRequest], bool] = lambda request: True


ENCODE = StageKind("E", "encode", "media", "vision", (), (IMAGE,), "image_budget", "ttft", "images", media=())
PREFILL = StageKind(
    "P",
    "prefill",
    "prefill",
    "language",
    needs=(IMAGE,),
    makes=(KV, STATE),
    budget="token_budget",
    bound="ttft",
    unit="tokens",
    needed_by=lambda request: not request.encode_only,
)
DECODE = StageKind(
    "D",
    "decode",
    "decodes",
    "language",
    needs=(KV, STATE),
    makes=(),
    budget="token_budget",
    bound="tbt",
    unit="rows",
    needed_by=lambda request: not request.encode_only and request.max_tokens - request.outputs > 1,
)
LANGUAGE_STAGES = PREFILL.letter + DECODE.letter  # which share the language model, and one stage object where both are
_table: tuple[StageKind, ...] = (ENCODE, PREFILL, DECODE)


@dataclass(frozen=True)
class Roles:
    """Describes what an instance with some letters does.

    - ``encodes``, ``prefills``, ``decodes``: whether its steps have such rows.
    - ``kinds``: kinds of block that it holds. ``features``: those of them that encoders make.
    - ``encoded``: features that it makes itself.
    - ``parts``: parts of the model whose weights it has.
    """

    encodes: bool
    prefills: bool
    decodes: bool
    kinds: frozenset[str]
    features: frozenset[str]
    encoded: frozenset[str]
    parts: frozenset[str]

    @property
    def only_encodes(self) -> bool:
        """True where it has an encoder's weights, and no others."""
        return self.encodes and not (self.prefills or self.decodes)

    @property
    def has_two_parts(self) -> bool:
        """True where one lane can encode while the other runs the language model."""
        return len(self.parts) > 1

    @property
    def hands_kv_on(self) -> bool:
        """True where prompts are prefilled for other instances."""
        return self.prefills and not self.decodes


@cache
def roles_of(letters: str) -> Roles:
    """Read what an instance with these letters does; letters that are no stage are nothing."""
    kinds = [kind for kind in _table if kind.letter in letters]
    work = {kind.work for kind in kinds}
    held = frozenset(block for kind in kinds for block in (*kind.needs, *kind.makes))
    encoded = frozenset(block for kind in kinds if kind.work == "media" for block in kind.makes)
    parts = frozenset(kind.part for kind in kinds)
    features = held & feature_kinds()
    return Roles("media" in work, "prefill" in work, "decodes" in work, held, features, encoded, parts)


def stage_kinds() -> tuple[StageKind, ...]:
    """Return the table, in the order in which a request passes its stages."""
    return _table


def all_letters() -> str:
    """Return the letters of all stages, in order."""
    return "".join(kind.letter for kind in _table)


def order_letters(letters: Iterable[str]) -> str:
    """Return those of these letters that are stages, each once, in order."""
    given = set(letters)
    return "".join(kind.letter for kind in _table if kind.letter in given)


@cache
def stage_of(letter: str) -> StageKind:
    """Find the entry of a letter. Raises ``KeyError`` for a letter that is no stage."""
    found = {kind.letter: kind for kind in _table}
    return found[letter]


@cache
def feature_kinds() -> frozenset[str]:
    """Kinds of block that hold features of media."""
    return frozenset(block for kind in _table if kind.work == "media" for block in kind.makes)


@cache
def block_kinds() -> tuple[str, ...]:
    """Kinds of block that some stage makes, in order."""
    return tuple(dict.fromkeys(block for kind in _table for block in kind.makes))


def encoders() -> tuple[StageKind, ...]:
    """Return the entries of stages that encode media."""
    return tuple(kind for kind in _table if kind.media is not None)


@cache
def encoder_of_media(media: str) -> StageKind:
    """Find the stage that encodes media of this kind: the one that names it, or else the one that takes all others."""
    named = (kind for kind in encoders() if media in (kind.media or ()))
    return next(named, next(kind for kind in encoders() if not kind.media))


@cache
def features_of(media: str) -> str:
    """Kind of block that holds the features of media of this kind."""
    return encoder_of_media(media).makes[0]


def encoder_of(request: StagedRequest) -> str:
    """Letter of the stage that encodes a request's media, which are all for one stage; "" for a request of text."""
    return encoder_of_media(request.media[0].kind).letter if request.media else ""


def encoders_of(request: StagedRequest) -> str:
    """Letters of the stages that would encode a request's media: of more than one no instance can serve it."""
    return order_letters({encoder_of_media(item.kind).letter for item in request.media}) if request.media else ""


def path_of(request: StagedRequest) -> str:
    """Letters of the stages that a request needs, or still needs, in order."""
    own = encoder_of(request)
    due = [kind.letter for kind in _table if (kind.media is None or kind.letter == own) and kind.needed_by(request)]
    return "".join(due)


@cache
def stages_on(letter: str, roles: str, encode_only: bool = False) -> str:
    """Letters of a stage and of those that follow it on an instance with these roles, without a pull between.

    No encoder follows another stage: a request has one at most.
    """
    found = letter
    after = _table[_table.index(stage_of(letter)) + 1 :]
    for kind in after if not encode_only else ():
        if kind.media is None:
            if kind.letter not in roles:
                break
            found += kind.letter
    return found


@cache
def taker_of(block: str) -> str:
    """Letter of the stage that blocks of this kind are handed on to."""
    return next(kind.letter for kind in _table if block in kind.needs)


@cache
def makers_for(letter: str) -> str:
    """Letters of the stages that make what a stage needs; "" for a stage that needs nothing."""
    needed = set(stage_of(letter).needs)
    return "".join(kind.letter for kind in _table if needed & set(kind.makes))


def count_alone(letter: str, units: int) -> tuple[int, int, int]:
    """Count decodes, prompt tokens and media tokens of a step that does ``units`` of one stage, and nothing else."""
    work = stage_of(letter).work
    decodes, prefill, media = (units if each == work else 0 for each in KINDS_OF_WORK)
    return decodes, prefill, media


def describe_stages() -> str:
    """Describe the stages for an error, as "E (encode), P (prefill), D (decode)"."""
    return ", ".join(f"{kind.letter} ({kind.name})" for kind in _table)


@contextmanager
def added_stage(added: StageKind, before: str) -> Iterator[None]:
    """Have one stage more in the table while the block runs, ahead of the stage ``before``, which needs what it makes.

    For trials of a stage that is not built: the shell computes nothing for it. The table is this process's; instances
    that were made outside of the block must not be used in it.
    """
    global _table
    kept, found = _table, []
    for kind in kept:
        is_next = kind.letter == before
        found += [added, replace(kind, needs=(*kind.needs, *added.makes))] if is_next else [kind]
    _set_table(tuple(found))
    try:
        yield
    finally:
        _set_table(kept)


def _set_table(table: tuple[StageKind, ...]) -> None:
    global _table
    _table = table
    for each in (roles_of, stage_of, feature_kinds, block_kinds, encoder_of_media, features_of):
        each.cache_clear()
    for other in (stages_on, taker_of, makers_for):
        other.cache_clear()
