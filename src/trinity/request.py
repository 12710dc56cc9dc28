"""Requests and their results: Request, Media, Sampling, Token, Output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from trinity.errors import RequestError

_ids = count(1)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Choice of the next token. The default is greedy.

    - ``temperature`` (0.0): divides the logits; 0 is greedy.
    - ``top_k`` (tokens, 0): sample from the k most likely tokens; 0 is off.
    - ``top_p`` (1.0): sample from the most likely tokens that reach this probability together; 1 is off.
    - ``min_p`` (0.0): drop tokens below this share of the largest probability; 0 is off.
    - ``repetition_penalty`` (1.0): reduces the logits of tokens that occurred already; 1 is off.
    - ``seed`` (None): noise depends on the seed and the output index alone, so that a seed gives the same tokens under
      every placement and batch. None draws a new seed at submission.
    - ``stop`` (strings, none): the output ends before the first of these.
    - ``stop_token_ids`` (token ids, none): the output ends at one of these.
    - ``ignore_eos`` (False): continue past the model's end-of-sequence token.
    - ``logprobs`` (tokens, None): report the log-probability of the chosen token and of this many most likely ones,
      after temperature and penalty and before truncation.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True if each token is the most likely one."""
        return self.temperature == 0.0


class Media(msgspec.Struct, frozen=True):
    """One media item.

    - ``kind``: "image"; models without a processor for it refuse other kinds ("video", "audio").
    - ``source``: a path (``MediaLimits.allow_paths``), bytes, a PIL image, an http(s) URL (``MediaLimits.allow_urls``),
      or an array or torch tensor [H, W, C] or [C, H, W], of bytes or what else transformers' processors take. Alpha is
      dropped and EXIF orientation applied, as transformers' ``load_image`` does.
    """

    kind: str
    source: Any


class Request(msgspec.Struct, frozen=True):
    """One request. Give either ``prompt`` or ``messages``.

    - ``prompt`` (None): raw text in which ``<image>`` marks the place of each image in turn, for every model.
    - ``messages`` (None): a chat as a list of {"role", "content"}, to which the model's chat template is applied.
    - ``images`` (none): sources of media of kind "image", as in ``Media``.
    - ``media`` (none): ``Media`` items, after ``images``.
    - ``max_tokens`` (tokens, 256): longest output; reduced to what the model's context leaves.
    - ``sampling`` (``Sampling()``): choice of tokens and end of the output.
    - ``deadline_s`` (seconds, None): the request ends with ``DeadlineExceeded`` this long after submission.
    - ``session`` (""): conversation that the request belongs to, for the trace.
    - ``request_id`` ("request-1", ...): unique name, used in errors and in the trace.

    Submitting it raises ``RequestError`` if a field is out of range (``max_tokens`` ≤ 0, NaN temperature, ...).
    """

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    images: Sequence[Any] = ()
    media: Sequence[Media] = ()
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    deadline_s: float | None = None
    session: str = ""
    request_id: str = msgspec.field(default_factory=lambda: f"request-{next(_ids)}")

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
    - ``finish_reason``: "stop", "length", "cancelled", "deadline" or "error".
    - ``prompt_tokens``, ``media_tokens`` (tokens): length of the prompt with visual tokens, and of these alone.
    - ``cached_tokens`` (tokens): part of the prompt that was in the prefix cache.
    - ``max_tokens`` (tokens): the limit in force; ``clipped``: it is below the request's, to fit the context.
    - ``ttft_s`` (seconds): time to first token; None if there was none.
    - ``itl_s`` (seconds): gaps between tokens, one less than there are tokens.
    - ``latency_s`` (seconds): from submission to the end.
    - ``spans`` (seconds): the eight spans of TriInfer's figure 11, by name (``trinity.metrics.SPANS``).
    - ``transfers``: records of its block transfers: kind, source, target, bytes, ...
    - ``route``: names of the instances that served it, in order.
    - ``attempts``: how often it was started.
    - ``logprobs``: of each token, if ``Sampling.logprobs`` is set.
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
    emulated: bool = False
    preemptions: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first (TPOT), in seconds; None with fewer than two tokens."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None


def check_request(request: Request) -> None:
    """Raise ``RequestError`` if a field of the request is out of range."""
    if not isinstance(request, Request):
        raise RequestError(f"give a trinity.Request, got {request!r:.80}")
    problem = _request_problem(request) or _sampling_problem(request.sampling)
    if problem:
        raise RequestError(problem, request.request_id)


def _request_problem(request: Request) -> str | None:
    if (request.prompt is None) == (request.messages is None):
        return "give either prompt= (text) or messages= (chat), not both or neither"
    for name, items in (("images", request.images), ("media", request.media)):
        if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
            return f"{name} must be a list, also for one item, got {type(items).__name__}"
    if any(not isinstance(item, Media) for item in request.media):
        return "media must hold trinity.Media(kind, source)"
    if not isinstance(request.request_id, str) or not request.request_id:
        return f"request_id must be non-empty text, got {request.request_id!r}"
    if not isinstance(request.session, str):
        return f"session must be text, got {request.session!r:.80}"
    if not isinstance(request.max_tokens, int) or request.max_tokens <= 0:
        return f"max_tokens must be a whole number of at least 1, got {request.max_tokens!r}"
    deadline = request.deadline_s
    if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline < math.inf):
        return f"deadline_s must be a number of seconds above 0, got {deadline!r}"
    return None


def _sampling_problem(sampling: Sampling) -> str | None:
    if not isinstance(sampling, Sampling):
        return f"sampling must be a trinity.Sampling, got {sampling!r:.80}"
    return _number_problem(sampling) or _stop_problem(sampling)


def _number_problem(sampling: Sampling) -> str | None:
    checks = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_k", sampling.top_k, 0, math.inf),
        ("top_p", sampling.top_p, 1e-9, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-9, math.inf),
        ("logprobs", sampling.logprobs or 0, 0, 100),
    )
    for name, value, low, high in checks:
        if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
            return f"{name} must lie between {low:g} and {high:g}, got {value!r}"
    for name, whole in (("top_k", sampling.top_k), ("seed", sampling.seed), ("logprobs", sampling.logprobs)):
        if whole is not None and not isinstance(whole, int):
            return f"{name} must be a whole number, got {whole!r}"
    return None


def _stop_problem(sampling: Sampling) -> str | None:
    if not isinstance(sampling.stop, (tuple, list)) or any(not isinstance(s, str) or not s for s in sampling.stop):
        return f"stop must be a tuple of non-empty strings, got {sampling.stop!r:.80}"
    ids = sampling.stop_token_ids
    if not isinstance(ids, (tuple, list)) or any(not isinstance(token, int) for token in ids):
        return f"stop_token_ids must be a tuple of token ids, got {ids!r:.80}"
    return None
