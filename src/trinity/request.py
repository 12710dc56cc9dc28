"""Requests and their results: Request, Media, Sampling, Token, Output; and the door that every request passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from trinity.errors import RequestError, describe_error
from trinity.errors.arguments import KeywordsByName, show
from trinity.errors.plain_values import (
    MOST_PARTS,
    Unfit,
    read_chat,
    read_count,
    read_flag,
    read_items,
    read_source,
    read_text,
    real_between,
)
from trinity.errors.sampling_values import MOST_COUNTED, MOST_NAMED, SAMPLING_READERS, STRUCTURED_READERS
from trinity.tables import Table, as_titled_html

ENCODED = "encoded"  # finish reason of a request that wanted features alone, and has them
DEFAULT_MAX_TOKENS = 256  # of a request and a checkpoint that say nothing
_MOST_PROMPT = 1 << 26  # characters; a context's own limit is far below
_MOST_SECONDS = 1e9
_MOST_SHOWN = 60  # characters of a text in an output's repr
_ids = count(1)


class Structured(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """A form that an output keeps to, one of these; llguidance (the extra ``structured``) follows it token by token.

    - ``json_schema``: a JSON schema, as a dict or as text, of what llguidance supports; others are refused by name.
    - ``regex``: a regular expression of the whole output, without look-around.
    - ``grammar``: a grammar in llguidance's Lark format.
    - ``json_object`` (False): any JSON object.

    The output ends only where the form is complete, or is cut by ``max_tokens`` or a stop string.
    """

    misuse = RequestError

    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


class Sampling(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True, omit_defaults=True):
    """Choice of the next token. A field that is not set (None) takes the value of the checkpoint's generation config.

    A value that is set wins, 0 and 1 too. Where neither says anything, a choice is greedy and each other field is off.

    - ``temperature``: divides the logits; 0 is greedy.
    - ``top_k`` (tokens): sample from the k most likely tokens; 0 is off.
    - ``top_p``: sample from the most likely tokens that reach this probability together; 1 is off.
    - ``min_p``: drop tokens below this share of the largest probability; 0 is off.
    - ``repetition_penalty``: reduces the logits of tokens that occurred already, in the prompt too; 1 is off.
    - ``presence_penalty``, ``frequency_penalty`` (0, 0): subtracted from the logits of tokens that the output has
      already, once, and for each time that it has them; from -2 to 2, as OpenAI's API and vLLM define them.
    - ``logit_bias`` (none): added to the logits of these token ids; from -100 to 100, as in OpenAI's API.
    - ``no_repeat_ngram_size`` (tokens): no run of so many tokens occurs twice, prompt included; 0 is off.
    - ``min_tokens`` (tokens): the output does not end by a token before it has so many, but by a stop string, as
      in transformers; 0 is off.
    - ``suppress_tokens``, ``begin_suppress_tokens`` (token ids): never sampled, or not as the first; () is off.
    - ``bad_words_ids`` (token ids each): sequences that the output does not complete; () is off.
    - ``forced_eos_token_id`` (token ids): the last token that ``max_tokens`` allows is one of these; () is off.
    - ``stop`` (up to 64 strings, or one; 16,384 characters in all): the output ends before the first of these, or
      with a special token that is one; () is off.
    - ``stop_token_ids`` (token ids, none): the output ends at one of these, besides the model's own.
    - ``ignore_eos`` (False): continue past the model's end-of-sequence token.
    - ``seed`` (None): noise depends on the seed and the output index alone, so that a seed gives the same tokens under
      every placement and batch. None draws a new seed at submission.
    - ``logits_processor`` (None): name of a function that changes each row of logits first
      (``trinity.register_logits_processor``, or an entry point of group ``trinity.logits_processors``).
    - ``structured`` (None): ``Structured``, a JSON schema, regex or grammar that the output keeps to.
    - ``logprobs`` (tokens, None): report the log-probability of the chosen token and of this many most likely ones,
      after temperature, penalties and bans and before truncation.
    """

    misuse = RequestError

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    stop: tuple[str, ...] | str | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logits_processor: str | None = None
    structured: Structured | None = None
    logprobs: int | None = None

    @classmethod
    def greedy(cls, **fields: Any) -> Sampling:
        """Take the most likely token each time, whatever the checkpoint's generation config says.

        Every field that it could set is set, to greedy or off; ``fields`` are set besides.
        """
        return cls(**{**PLAIN_GREEDY, **fields})


PLAIN_GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_tokens": 0,
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "bad_words_ids": (),
    "forced_eos_token_id": (),
    "stop": (),
}
"""Every field of ``Sampling`` that a checkpoint may set, greedy or off."""


class Media(msgspec.Struct, metaclass=KeywordsByName, frozen=True):
    """One media item.

    - ``kind``: "image", "video", "audio" or another ``MediaKind``'s name; a model that does not take it refuses it.
    - ``source`` of a video: a ``trinity.Clip``, an array or list of its frames, or a file as an image's may be.
    - ``source`` of audio: a path, bytes, URI or URL of a wav or flac file, an array [samples] or [channels, samples] of
      floats at the model's rate, or {"array": ..., "sampling_rate": ...}.
    - ``source`` of an image: a path or file: URL (``MediaLimits.allow_paths``), bytes, a data: URI, a PIL image, an
      http(s) URL (``allow_urls``, ``allowed_hosts``), or an array or torch tensor [H, W, C] or [C, H, W], of bytes or
      what else transformers' processors take. What is transparent is laid on white (``Pipeline(transparency=)``), EXIF
      orientation applied.
    """

    misuse = RequestError

    kind: str
    source: Any


class Request(msgspec.Struct, metaclass=KeywordsByName, frozen=True):
    """One request. Give either ``prompt`` or ``messages``.

    - ``prompt`` (None): raw text in which ``<image>`` marks the place of each image in turn, for every model.
    - ``messages`` (None): a chat as a list of {"role", "content"}, to which the model's chat template is applied, with
      content parts as OpenAI and Hugging Face write them. A part has its image in it, or takes the next of ``images``.
    - ``images`` (none): sources of media of kind "image", as in ``Media``.
    - ``media`` (none): ``Media`` items, after ``images``.
    - ``max_tokens`` (tokens, None): longest output; reduced to what the model's context leaves. None takes the limit of
      the checkpoint's generation config, else 256.
    - ``sampling`` (``Sampling()``): choice of tokens and end of the output; what it leaves open, the checkpoint says.
    - ``deadline_s`` (seconds, None): the request ends with ``DeadlineExceeded`` this long after submission.
    - ``session`` (""): conversation that the request belongs to, for the trace.
    - ``request_id`` ("request-1", ...): unique name, used in errors and in the trace.
    - ``tools`` (None): tools as JSON schemas, for chat templates that take some.
    - ``template_kwargs`` (none): further variables of the chat template, such as ``enable_thinking``, and transformers'
      ``add_generation_prompt`` and ``continue_final_message``.
    - ``cache_salt`` (""): requests of different salts share no cached block, such as those of different tenants.
    - ``untrusted`` (False): its messages and media came from outside. Of media in text only data: URIs are read, and
      URLs of ``MediaLimits.allowed_hosts``; roles are OpenAI's. See SECURITY.md.
    - ``special_tokens`` (None): whether special tokens in its texts act as such, or are text; None: they act unless it
      is untrusted.
    - ``client`` (""): name of the client that sent it. Requests are prepared in fair turns of their clients, and those
      of one client leave room for others to wait. Requests without a name share one turn. The server sets a digest.

    Submitting it raises ``RequestError`` if a field is out of range (``max_tokens`` ≤ 0, NaN temperature, ...).
    """

    misuse = RequestError

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    images: Sequence[Any] = ()
    media: Sequence[Media] = ()
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    deadline_s: float | None = None
    session: str = ""
    request_id: str = msgspec.field(default_factory=lambda: f"request-{next(_ids)}")
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = {}
    cache_salt: str = ""
    untrusted: bool = False
    special_tokens: bool | None = None
    client: str = ""

    def all_media(self) -> list[Media]:
        """List ``images`` and ``media``, in this order."""
        return [Media("image", source) for source in self.images] + list(self.media)


class Token(msgspec.Struct, frozen=True):
    """One output token.

    - ``id``: token id.
    - ``text``: text that it adds to the output; "" while that may still change.
    - ``index``: position in the output, from 0.
    - ``logprob`` (None), ``top_logprobs`` (None): its log-probability, and (id, log-probability) of the most likely
      tokens, if ``Sampling.logprobs`` asks for them.
    """

    id: int
    text: str
    index: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Output(msgspec.Struct, kw_only=True):
    """Result of one request.

    - ``request_id``: the request's.
    - ``text``, ``token_ids``: the output, without the stop string.
    - ``finish_reason``: "stop", "length", "cancelled", "deadline" or "error"; "encoded" of one for features alone.
    - ``prompt_tokens``, ``media_tokens`` (tokens): length of the prompt with visual tokens, and of these alone.
    - ``cached_tokens`` (tokens): part of the prompt that was in the prefix cache.
    - ``max_tokens`` (tokens): the limit in force; ``clipped``: it is below the request's, to fit the context.
    - ``ttft_s`` (seconds): time to first token; None if there was none.
    - ``itl_s`` (seconds): gaps between tokens, one less than there are tokens.
    - ``latency_s`` (seconds): from submission to the end.
    - ``spans`` (seconds): the eight spans of TriInfer's figure 11, by name (``trinity.metrics.SPANS``).
    - ``transfers``: records of its block transfers: kind, source, target, bytes, ...
    - ``route``: names of the instances that served it, in order.
    - ``attempts``: how often it was sent to its first stage: once, and again after each loss or preemption elsewhere.
    - ``lives``: how often it was begun: 1, and 1 more for each loss that it survived. ``former_lives``: how those
      ended, each with ``why``, ``tokens`` that were out, ``seconds``, ``route`` and ``spans``.
    - ``recomputed_tokens`` (tokens): positions of prompt and output that were prefilled again because of these losses.
    - ``logprobs``, ``top_logprobs``: of each token, and (id, log-probability) of the most likely ones in its place, if
      ``Sampling.logprobs`` is set. It is -inf for tokens that could not be taken.
    - ``emulated``: stages waited in place of computing, so that tokens mean nothing and times are a cost model's.
    - ``preemptions``: times that it gave up its KV blocks for an older request and was recomputed
      (``Instance(reservation="optimistic")``).
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    media_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int = 0
    clipped: bool = False
    ttft_s: float | None = None
    itl_s: list[float] = msgspec.field(default_factory=list)
    latency_s: float = 0.0
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    transfers: list[dict[str, Any]] = msgspec.field(default_factory=list)
    route: list[str] = msgspec.field(default_factory=list)
    attempts: int = 1
    logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...] | None] = msgspec.field(default_factory=list)
    emulated: bool = False
    preemptions: int = 0
    lives: int = 1
    former_lives: list[dict[str, Any]] = msgspec.field(default_factory=list)
    recomputed_tokens: int = 0

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _MOST_SHOWN else f"{self.text[:_MOST_SHOWN]}…"
        return f"Output({self.request_id!r}: {text!r}, {', '.join(f'{name} {value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        return as_titled_html(self.text, Table(("request", self.request_id), self._facts()))

    def _facts(self) -> list[tuple[str, str]]:
        """List what a reader looks for first, without what does not apply."""
        first, each = ("" if seconds is None else f"{1e3 * seconds:.1f} ms" for seconds in (self.ttft_s, self.tpot_s))
        parts = {"visual": self.media_tokens, "cached": self.cached_tokens}
        within = ", ".join(f"{count} {name}" for name, count in parts.items() if count)
        facts = [
            ("finish", self.finish_reason + (" (emulated)" if self.emulated else "")),
            ("tokens", str(len(self.token_ids))),
            ("prompt", str(self.prompt_tokens) + (f" ({within})" if within else "")),
            ("TTFT", first),
            ("TPOT", each),
            ("route", " → ".join(self.route)),
        ]
        return [(name, value) for name, value in facts if value]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first (TPOT), in seconds; None with fewer than two tokens."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None


# ---------------------------------------------------------------- the door that every request passes


def check_request(request: Request) -> Request:
    """Return the request with plain, bounded values in all its fields: nothing but a medium's source is still foreign.

    Numbers become int and float, subclasses of str and tuple lose what they add, lists are copied. What passes can be
    encoded in a message. Raises ``RequestError`` if a field is out of range.
    """
    if not isinstance(request, Request):
        raise RequestError(f"give a trinity.Request, got {show(request)}")
    try:
        return msgspec.structs.replace(request, **_plain_fields(request))
    except Unfit as problem:
        raise RequestError(str(problem), _plain_name(request)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a value of a foreign type may raise anything when it is read
        text = f"a field of the request cannot be read ({describe_error(error)})"
        raise RequestError(text, _plain_name(request)) from error


def check_sampling(sampling: Sampling) -> Sampling:
    """Return the sampling with plain, bounded values. Raises ``RequestError`` if a field is out of range."""
    try:
        return _plain_sampling(sampling)
    except Unfit as problem:
        raise RequestError(str(problem)) from None


def _plain_name(request: Request) -> str:
    """Return the request's name for an error, "" if it is none."""
    try:
        return read_text("request_id", request.request_id, MOST_NAMED)
    except Exception:
        return ""


def _plain_fields(request: Request) -> dict[str, Any]:
    if (request.prompt is None) == (request.messages is None):
        raise Unfit("give either prompt= (text) or messages= (chat), not both or neither")
    name = read_text("request_id", request.request_id, MOST_NAMED)
    if not name:
        raise Unfit("request_id must be non-empty text, got ''")
    left = [MOST_PARTS]
    return {
        "prompt": None if request.prompt is None else read_text("prompt", request.prompt, _MOST_PROMPT),
        "messages": None if request.messages is None else read_chat("messages", request.messages, _MOST_PROMPT, left),
        "images": tuple(map(read_source, read_items("images", request.images))),
        "media": tuple(map(_plain_media, read_items("media", request.media))),
        "max_tokens": None if request.max_tokens is None else _limit("max_tokens", request.max_tokens),
        "sampling": _plain_sampling(request.sampling),
        "deadline_s": None if request.deadline_s is None else _deadline("deadline_s", request.deadline_s),
        "session": read_text("session", request.session, MOST_NAMED),
        "request_id": name,
        "tools": None if request.tools is None else _plain_tools(request.tools, left),
        "template_kwargs": _plain_variables("template_kwargs", request.template_kwargs, left),
        "cache_salt": read_text("cache_salt", request.cache_salt, MOST_NAMED),
        "untrusted": read_flag("untrusted", request.untrusted),
        "special_tokens": None if (acts := request.special_tokens) is None else read_flag("special_tokens", acts),
        "client": read_text("client", request.client, MOST_NAMED),
    }


def _plain_tools(tools: Any, left: list[int]) -> list[Any]:
    return [_plain_variables("tools", each, left) for each in read_items("tools", tools)]


def _plain_variables(name: str, value: Any, left: list[int]) -> dict[str, Any]:
    """Copy a mapping by name; what its values hold is read by the chat template alone."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Unfit(f"{name} must be given by name, as dicts, got {show(value)}")
    copied: dict[str, Any] = read_chat(name, value, _MOST_PROMPT, left)
    return copied


def _plain_sampling(sampling: Sampling) -> Sampling:
    if not isinstance(sampling, Sampling):
        raise Unfit(f"sampling must be a trinity.Sampling, got {show(sampling)}")
    given = {name: getattr(sampling, name) for name in Sampling.__struct_fields__}
    readers = {**SAMPLING_READERS, "structured": _plain_structured}
    return Sampling(**{name: readers[name](name, value) for name, value in given.items() if value is not None})


def _plain_structured(name: str, value: Structured) -> Structured:
    """Read a form; a schema becomes text."""
    if not isinstance(value, Structured):
        raise Unfit(f"{name} must be a trinity.Structured, got {show(value)}")
    given = {field: getattr(value, field) for field in Structured.__struct_fields__}
    fields = {field: STRUCTURED_READERS[field](field, each) for field, each in given.items() if each is not None}
    if sum(each is not False for each in fields.values()) != 1:
        raise Unfit(f"{name} must have exactly one of json_schema, regex, grammar and json_object=True")
    return Structured(**fields)


def _plain_media(item: Media) -> Media:
    if not isinstance(item, Media):
        raise Unfit("media must hold trinity.Media(kind, source)")
    return Media(read_text("kind", item.kind, MOST_NAMED), read_source(item.source))


def _limit(name: str, value: Any) -> int:
    """Read a count that a context bounds anyway: a huge one says "as many as there is room for"."""
    number = read_count(name, value)
    if number < 1:
        raise Unfit(f"{name} must be a whole number of at least 1, got {show(value)}")
    return min(number, MOST_COUNTED)


def _deadline(name: str, value: Any) -> float:
    seconds = real_between(0.0, _MOST_SECONDS)(name, value)
    if seconds == 0:
        raise Unfit(f"{name} must be a number of seconds above 0, got {show(value)}")
    return seconds
