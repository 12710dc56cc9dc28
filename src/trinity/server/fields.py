"""Fields of request bodies, OpenAI's and vLLM's, as a ``trinity.Request``. Fields that nobody knows are ignored.

A field that would change the answer and is not served is refused by name, unless its value turns it off.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from trinity.errors import RequestError
from trinity.errors.sampling_values import MOST_BIASED, MOST_NAMED
from trinity.request import Request, Sampling, Structured
from trinity.server.structured_fields import Form, read_form
from trinity.server.tool_choice import ToolChoice, read_tools

Body = TypeVar("Body")
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Fields that would change the answer, with the values that turn each off. None does so for all."""

_SAMPLED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
    "ignore_eos",
)
"""Fields that the body and ``Sampling`` have in common."""
ROOM_TOKENS = (1 << 31) - 1  # as many as there is room for
_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
_LEAST_TOP_P = 1e-9  # what OpenAI's 0 means: the most likely token alone


class StreamOptions(msgspec.Struct):
    """Options of a streamed response: ``usage`` in a last chunk, or in each one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that the bodies of chats and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    return_token_ids: bool | None = None


class ChatBody(SamplingFields, kw_only=True):
    """Body of a chat completion."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """Body of a completion of raw text."""

    prompt: str | list[str]
    logprobs: int | None = None


class ParsedCall(msgspec.Struct, kw_only=True):
    """The call of a client: requests, and the form of the response.

    - ``requests``: one for each prompt.
    - ``choices``: answers to each.
    - ``logprobs`` (None): most likely tokens to report beside the chosen one.
    - ``tools`` (none): that the model may call.
    """

    requests: tuple[Request, ...]
    model: str | None = None
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    token_ids: bool = False
    tools: ToolChoice = msgspec.field(default_factory=ToolChoice)


def read_chat_body(body: Mapping[str, Any]) -> Request:
    """Turn the body of a chat completion into a request. Raises ``RequestError`` that names the field at fault."""
    return read_chat_call(body).requests[0]


def read_chat_call(body: Mapping[str, Any]) -> ParsedCall:
    """Read the body of a chat completion. Raises ``RequestError`` that names the field at fault."""
    asked = read_fields(body, ChatBody)
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    if asked.top_logprobs and not asked.logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    tools = read_tools(asked.tools, asked.tool_choice)
    request = make_request(
        messages=asked.messages,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        sampling=make_sampling(asked, logprobs, bind_output(read_form(body), tools)),
        deadline_s=asked.deadline_s,
        request_id=new_id("chatcmpl"),
        tools=tools.definitions or None,
        template_kwargs=_template_kwargs(asked),
        cache_salt=asked.cache_salt or "",
    )
    return make_call(asked, [request], logprobs, tools)


def _template_kwargs(asked: ChatBody) -> dict[str, Any]:
    """Gather what the chat template is told besides the messages."""
    fields = {name: getattr(asked, name) for name in _OF_TEMPLATE if getattr(asked, name) is not None}
    return fields | (asked.chat_template_kwargs or {})


def make_request(**fields: Any) -> Request:
    """Make a request that came from outside: it names no file, and no host but those that are allowed."""
    return Request(**fields, untrusted=True)


def read_completion_call(body: Mapping[str, Any], most_prompts: int = 1024) -> ParsedCall:
    """Read the body of a completion. Raises ``RequestError`` that names the field at fault.

    ``most_prompts`` are counted before a request is made of one: a body of a few MiB holds millions.
    """
    asked = read_fields(body, CompletionBody)
    texts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if not texts:
        raise RequestError("prompt must have at least one text")
    if len(texts) > most_prompts:
        raise RequestError(f"prompt has {len(texts)} texts; {most_prompts} are allowed")
    sampling, name = make_sampling(asked, asked.logprobs, read_form(body)), new_id("cmpl")
    requests = [
        make_request(
            prompt=text,
            max_tokens=16 if asked.max_tokens is None else asked.max_tokens,
            sampling=sampling,
            deadline_s=asked.deadline_s,
            request_id=f"{name}-{index}" if index else name,
            cache_salt=asked.cache_salt or "",
            special_tokens=True,  # the whole prompt is the caller's, as a chat template's text is the model's
        )
        for index, text in enumerate(texts)
    ]
    return make_call(asked, requests, asked.logprobs)


def make_call(
    asked: SamplingFields, requests: Sequence[Request], logprobs: int | None, tools: ToolChoice | None = None
) -> ParsedCall:
    """Make the call of the fields that all bodies have."""
    if asked.n is not None and asked.n < 1:
        raise RequestError(f"n must be at least 1, got {asked.n}")
    options = asked.stream_options or StreamOptions()
    return ParsedCall(
        requests=tuple(requests),
        model=asked.model,
        choices=asked.n or 1,
        stream=bool(asked.stream),
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        logprobs=logprobs,
        token_ids=bool(asked.return_token_ids),
        tools=tools or ToolChoice(),
    )


def read_fields(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert a body into its struct. Raises ``RequestError`` for a wrong type and for a field that is not served."""
    refuse_fields(body, REFUSED_FIELDS)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("`", "")) from None


def refuse_fields(body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ``RequestError`` for a field that is not served, unless its value is one of those that turn it off."""
    for name in refused.keys() & body.keys():
        if body[name] is not None and not any(body[name] == off for off in refused[name]):
            raise RequestError(f"{name} is not served here; leave it out")


def bind_output(form: Form | None, tools: ToolChoice) -> Form | None:
    """Choose the form of an output: a call that is demanded, else the form that is asked for."""
    if tools.forced and form is not None:
        raise RequestError("give either a form of the output or a tool_choice that demands a call")
    return {"json_schema": tools.forced_schema()} if tools.forced else form


def make_sampling(asked: SamplingFields, logprobs: int | None, form: Form | None = None) -> Sampling:
    """Make the sampling that a body asks for; what it leaves open, the checkpoint says."""
    fields: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(asked, name)) is not None}
    if fields.get("top_k") == -1:  # vLLM's word for off
        fields["top_k"] = 0
    if "top_p" in fields:
        fields["top_p"] = max(fields["top_p"], _LEAST_TOP_P) if fields["top_p"] >= 0 else fields["top_p"]
    if asked.stop:
        fields["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    if asked.stop_token_ids:
        fields["stop_token_ids"] = tuple(asked.stop_token_ids)
    if asked.logit_bias:
        if len(asked.logit_bias) > MOST_BIASED:
            raise RequestError(f"logit_bias has {len(asked.logit_bias)} token ids; {MOST_BIASED} are allowed")
        fields["logit_bias"] = {_token_id(name): bias for name, bias in asked.logit_bias.items()}
    if form is not None:
        fields["structured"] = Structured(**form)
    return Sampling(**fields, logprobs=logprobs)


def _token_id(name: str) -> int:
    if len(name) > MOST_NAMED or not name.isascii() or not name.isdigit():
        raise RequestError(f"logit_bias has {name[:20]!r} for a token id; give whole numbers")
    return int(name.lstrip("0")[:20] or "0")


def complete_request(request: Request, limited: bool, deadline_s: float | None, client: str = "") -> Request:
    """Fill in what a server says: its deadline where the request has a later one, and the context as longest output.

    ``limited``: the checkpoint's own limit goes before the context. ``client``: that the request is of, as a digest.
    """
    fields: dict[str, Any] = {"client": client}
    if request.max_tokens is None and not limited:
        fields["max_tokens"] = ROOM_TOKENS
    if deadline_s is not None and (request.deadline_s is None or request.deadline_s > deadline_s):
        fields["deadline_s"] = deadline_s
    return msgspec.structs.replace(request, **fields)


def new_id(kind: str) -> str:
    """Make a name of a response, unlike any other: ``chatcmpl-...``."""
    return f"{kind}-{secrets.token_hex(12)}"
