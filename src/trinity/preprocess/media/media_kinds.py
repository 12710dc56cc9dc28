"""Kinds of media by name: those built in, those of other packages, and those that this program registers.

A ``MediaKind`` says what belongs to a kind whatever the model: its content parts and its limits.
``open_reader`` gives the ``KindReader`` of one model, which makes items of sources with the model's own processor.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import msgspec

from trinity.errors import BadMedia, ConfigError, RequestError, describe_error
from trinity.errors.plain_values import is_address
from trinity.preprocess.media.images import WHITE, Transparency
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Media, Request

if TYPE_CHECKING:
    from trinity.preprocess.media_limits import MediaBudget, MediaLimits, Price


KIND_ENTRY_POINTS = "trinity.media_kinds"
OWN_KEYS = ("url", "path", "base64")
_BUILT_IN = {"image": "image_kind:ImageKind", "video": "video_kind:VideoKind", "audio": "audio_kind:AudioKind"}
_FIRST = ("image", "video", "audio")  # in the order of transformers' token type ids, which begin at 1


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """Markup of one kind of media in a model's text.

    - ``token``: placeholder that the model's processor expands.
    - ``marker``: text that replaces ``<image>`` and the like in raw text; it has ``token`` once.
    - ``reserved`` (none): tokens that must not occur in a user's own text.
    """

    token: str
    marker: str
    reserved: tuple[str, ...] = ()


class MediaItem(msgspec.Struct, frozen=True):
    """A preprocessed media item.

    - ``kind``: "image" or another name of a ``MediaKind``.
    - ``expansion``: text that replaces the item's placeholder.
    - ``tokens``: rows of features, which are the placeholders in the expansion.
    - ``inputs``: tensors for the model's encoder, by name.
    - ``content``: digest of content and processor, the key of the image cache.
    - ``meta``: inputs of the position computation, by name.
    - ``width``, ``height`` (pixels, 0): size of the image that was read.
    - ``strip`` (0): its place among the strips of one image; see ``strips.cut_item``.
    - ``prompt``, ``rows`` (none): of an image in front, ids of its whole prompt, and where features replace them.
    """

    kind: str
    expansion: str
    tokens: int
    inputs: dict[str, Any]
    content: str
    meta: dict[str, Any]
    width: int = 0
    height: int = 0
    strip: int = 0
    prompt: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


class ModelFiles(msgspec.Struct, frozen=True):
    """The parts of a model in which a kind finds its placeholder.

    - ``config``, ``tokenizer``, ``processor``: the model's.
    - ``last_call``: as in ``LoadedProcessor``.
    - ``media_ids``: ids of the prompt's rows that features replace.
    - ``image_token`` (""): text of an image, where a proof found it; "" leaves it to the processor.
    - ``image_marker`` (""): the same with what must stand around it, where a proof found it; "" is the type's own.
    - ``audio_token`` (None): likewise of a clip; "" if the proof found that clips do not serve.
    - ``other_ids`` (none): of further tokens that the config names for media, which must not be in a text either.
    - ``in_front`` (False): as in ``MediaFacts``.
    """

    config: Any
    tokenizer: Any
    processor: Any
    last_call: threading.local
    media_ids: frozenset[int]
    image_token: str = ""
    image_marker: str = ""
    audio_token: str | None = None
    other_ids: frozenset[int] = frozenset()
    in_front: bool = False


class LoadedProcessor(msgspec.Struct, frozen=True):
    """Config, tokenizer and processor of one model.

    - ``config``, ``tokenizer``: as transformers loads them.
    - ``processor``: the model's own; None for a text-only model.
    - ``last_call``: of this thread: ``text`` is what the processor passed to its tokenizer last, ``special`` if special
      tokens were to be added, ``pixels`` is what its resizes may still make.
    - ``eos_ids``: token ids that end an output.
    - ``placeholders``: by kind of media.
    - ``media_token_ids``: ids of the prompt's rows that features replace.
    - ``run_tokenizer``: tokenizes texts with expanded placeholders.
    - ``atomic`` (False): as in ``ImageText``.
    - ``whole_prompt``, ``together``, ``refused``, ``single``, ``in_front``: as in ``MediaFacts``.
    - ``writer`` (None): config of the text model, where ``MediaFacts.text_writes``.
    - ``pools_images`` (False): the class pools an image to one row, its embedding.
    - ``special_ids`` ({}): ids of special tokens by their text, which outputs do not show.
    - ``tiles`` (""): as in ``ImageText``.
    - ``video_tail`` (0): as in ``VideoText``.
    - ``beside`` (""): as in ``MediaFacts``.
    - ``transparency`` ("white"): what becomes of transparent pixels.
    - ``clip_tokens`` (0): the fewest tokens of a clip that the model takes, by its proof; 0: none was run.
    """

    config: Any
    tokenizer: Any
    processor: Any
    last_call: threading.local
    eos_ids: frozenset[int]
    placeholders: dict[str, Placeholder]
    media_token_ids: frozenset[int]
    run_tokenizer: RunTokenizer
    atomic: bool = False
    whole_prompt: bool = False
    together: frozenset[int] = frozenset()
    refused: dict[str, str] = {}
    single: bool = False
    in_front: bool = False
    writer: Any = None
    pools_images: bool = False
    special_ids: dict[str, int] = {}
    tiles: str = ""
    video_tail: int = 0
    clip_tokens: int = 0
    beside: str = ""
    transparency: Transparency = WHITE


def add_salt(content: str, salt: str) -> str:
    """Return the name of an item's features for requests of one salt alone: nobody else finds them in a cache."""
    return hashlib.blake2b(f"{salt}\0{content}".encode(), digest_size=16).hexdigest() if salt else content


class KindReader(Protocol):
    """Makes items of one kind for one model, from any thread.

    ``fingerprint`` hashes all but an item's own content that decides its features.
    """

    fingerprint: str

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        """Turn a source into one of the same content that another process can be sent, at no more cost than its size.

        ``among``: items of this kind in the prompt. Raises ``MediaProblem`` or ``TooManyTokens``.
        """

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        """Read and preprocess an item of a prompt that has ``among`` of its kind.

        Whatever may be costly is charged to ``budget`` before it is done. Raises ``MediaProblem`` or ``TooManyTokens``.
        """

    def number_expansion(self, expansion: str, index: int) -> str:
        """Return an item's expansion as it is at this place among the prompt's media."""

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        """Make an item of about so many tokens for profiling; None: of a usual size."""


@runtime_checkable
class PricedReader(Protocol):
    """A ``KindReader`` that knows what an item costs beforehand; items of other readers count as costing nothing."""

    def price_source(self, source: Any, among: int) -> Price:
        """Price reading and preprocessing an item, from its header and structure, without decoding it.

        ``among``: items of this kind in the prompt. A URL is priced once it has been fetched. Raises ``MediaProblem``.
        """


class MediaKind(ABC):
    """One kind of media. Subclass it, and register an object of it, to add one.

    - ``name``: in ``Media.kind``, and the marker ``<name>`` in raw prompts.
    - ``parts``: content parts of a chat that hold an item: the keys of its source, by the part's type.
    - ``count_limit``, ``bytes_limit``: fields of ``MediaLimits`` that bound a request's items, and the bytes of each.
    - ``accept`` ("*/*"): media types that a URL's server is asked for.

    A model takes the kind if ``find_placeholder`` finds its token. Its adapter's ``encode`` gets the kind's name, and
    with ``ModelAdapter`` that is ``get_NAME_features`` of the model.
    """

    name: ClassVar[str]
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    count_limit: ClassVar[str] = "max_images"
    bytes_limit: ClassVar[str] = "max_image_bytes"
    accept: ClassVar[str] = "*/*"

    @abstractmethod
    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        """Find this kind's markup in a model's own text; None if the model takes none. May prepare its processor."""

    @abstractmethod
    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> KindReader:
        """Make the reader for one model that takes this kind."""

    def most_bytes(self, limits: MediaLimits) -> int:
        """Return how many bytes one item may have before it is decoded."""
        return int(getattr(limits, self.bytes_limit))


_registered: dict[str, MediaKind] = {}


def register_media_kind(kind: MediaKind) -> None:
    """Register a kind of media in this process, or replace one. Pipelines that start later take it.

    Processes that preprocess (``MediaLimits.processes``) know those that a package names in an entry point of group
    "trinity.media_kinds". Raises ``ConfigError`` if it is none, or its name is no plain word.
    """
    if not isinstance(kind, MediaKind) or not (isinstance(kind.name, str) and kind.name.isidentifier()):
        raise ConfigError(f"a kind of media is an object of a subclass of MediaKind with a name, got {kind!r:.100}")
    _registered[kind.name] = kind
    part_keys.cache_clear()


@functools.cache
def _named_by_packages() -> tuple[str, ...]:
    return tuple(sorted(point.name for point in entry_points(group=KIND_ENTRY_POINTS)))


def kind_names() -> tuple[str, ...]:
    """List the kinds by name: first those of transformers' token type ids, in their order, then others."""
    others = {*_BUILT_IN, *_registered, *_named_by_packages()}.difference(_FIRST)
    return (*_FIRST, *sorted(others))


def find_kind(name: str) -> MediaKind | None:
    """Return the kind of this name; None for one that transformers knows and nobody reads here yet."""
    return _registered.get(name) or _load_kind(name)


def find_fetch_rules(name: str) -> tuple[str, str]:
    """Return the media types that servers are asked for, and the field of ``MediaLimits`` that bounds an item."""
    kind = find_kind(name)
    assert kind is not None, "a model takes no kind that cannot be read"
    return kind.accept, kind.bytes_limit


@functools.cache
def _load_kind(name: str) -> MediaKind | None:
    for point in entry_points(group=KIND_ENTRY_POINTS, name=name):
        try:
            loaded = point.load()
            kind = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # other people's code
            raise ConfigError(
                f"kind of media {name!r} ({point.value}) cannot be loaded: {describe_error(error)}"
            ) from error
        if not isinstance(kind, MediaKind) or kind.name != name:
            raise ConfigError(
                f"entry point {name!r} of group {KIND_ENTRY_POINTS} is no MediaKind of that name: {kind!r:.100}"
            )
        return kind
    if name not in _BUILT_IN:
        return None
    module, _, kind_class = _BUILT_IN[name].partition(":")
    made: MediaKind = getattr(import_module(f"{__package__}.{module}"), kind_class)()
    return made


def list_kinds() -> list[MediaKind]:
    """List the kinds that can be read, in the order of ``kind_names``."""
    return [kind for name in kind_names() if (kind := find_kind(name)) is not None]


@functools.cache
def part_keys() -> Mapping[str, tuple[str, Sequence[str]]]:
    """Return kind and keys of a medium by the type of a content part, for all kinds, read here or not."""
    known: dict[str, tuple[str, Sequence[str]]] = {}
    for name in kind_names():
        kind = find_kind(name)
        given = {} if kind is None else kind.parts
        usual = {name: (name, *OWN_KEYS), f"{name}_url": (f"{name}_url",)}
        usual[f"input_{name}"] = (f"input_{name}", f"{name}_url")
        known.update({part: (name, tuple(keys)) for part, keys in {**usual, **given}.items()})
    return known


def admit_media(
    request: Request, media: Sequence[Media], loaded: LoadedProcessor, kinds: Sequence[MediaKind], limits: MediaLimits
) -> None:
    """Raise what is wrong with the media of a request for a model of these kinds: ``BadMedia``, ``RequestError``."""
    name, model_type = request.request_id, str(loaded.config.model_type)
    if not media and (why := loaded.refused.get("text")):
        one = {"image": "an image", "audio": "a clip"}.get(kinds[0].name, f"a {kinds[0].name}")
        raise RequestError(f"model type {model_type!r} takes no prompt without {one}: {why}; give {one}", name)
    known = {kind.name for kind in kinds}
    for item in media:
        if item.kind not in known:
            takes = ", ".join(sorted(known)) or "text only"
            why = f": {loaded.refused[item.kind]}" if item.kind in loaded.refused else ""
            message = f"model type {model_type!r} takes no media of kind {item.kind!r} here{why}; it takes {takes}"
            raise BadMedia(message, name)
        if request.untrusted and isinstance(item.source, (str, os.PathLike)) and not is_address(item.source):
            message = (
                f"this {item.kind} is no data: URI, http: or https: URL, and nothing else is read for this request"
            )
            raise BadMedia(message, name)
    counts = Counter(item.kind for item in media)
    if (loaded.in_front or loaded.single) and counts["image"] > 1:
        why = "in front of its text" if loaded.in_front else "since what it makes of one depends on those beside it"
        message = f"model type {model_type!r} takes one image a prompt, {why}; {counts['image']} are given"
        raise BadMedia(f"{message}, so ask about each by itself", name)
    for kind in kinds:
        given, most = counts[kind.name], int(getattr(limits, kind.count_limit))
        if given > most:
            message = f"{given} {kind.name}s given, but the limit {kind.count_limit} is {most}; give fewer"
            raise BadMedia(message, name)


class RunTokenizer:
    """Tokenizes texts with each run of one placeholder shortened to one, then restores the others.

    - ``tokenizer``: the model's.
    - ``placeholders``: token ids. Those that the tokenizer merges with their neighbours are not shortened.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[int]) -> None:
        tokens = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in placeholders}
        self._tokens = {number: token for number, token in tokens.items() if _is_kept_apart(tokenizer, token, number)}
        self._run = re.compile(rf"({'|'.join(map(re.escape, self._tokens.values()))})\1*")

    def tokenize(self, text: str, tokenise: Callable[[str], Sequence[int]]) -> list[int]:
        """Return what ``tokenise(text)`` would, in less time."""
        if not self._tokens:
            return list(tokenise(text))
        lengths: list[int] = []

        def first(run: re.Match[str]) -> str:
            lengths.append(len(run[0]) // len(run[1]))
            return run[1]

        short = tokenise(self._run.sub(first, text))
        if sum(number in self._tokens for number in short) != len(lengths):  # part of another token, for instance
            return list(tokenise(text))
        left, found = iter(lengths), list[int]()
        for number in short:
            found += [number] * (next(left) if number in self._tokens else 1)
        return found


def _is_kept_apart(tokenizer: Any, token: str, number: int) -> bool:
    """Tell if three in a row are three tokens and leave the text around them as it was."""
    one, three = (tokenizer(f"a {token * count} b", verbose=False)["input_ids"] for count in (1, 3))
    at = one.index(number) if number in one else len(one)
    return bool(at < len(one) and three == [*one[:at], *[number] * 3, *one[at + 1 :]])
