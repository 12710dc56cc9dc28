"""Fields of request bodies, OpenAI's and vLLM's, as a ``trinity.Request``: each is read and converted here, once.

Fields that nobody knows are ignored. A field that would change the answer and is not served is refused by name, unless
its value turns it off.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from trinity.errors import RequestError, show
from trinity.errors.plain_values import MOST_ITEMS
from trinity.errors.sampling_values import MOST_BIASED, MOST_GRAMMAR, MOST_NAMED
from trinity.request import Request, Sampling, Structured

Body = TypeVar("Body")
Form = dict[str, Any]  # keywords of trinity.Structured, exactly one
Unserved = Mapping[str, tuple[Any, ...]]  # fields, with the values that turn each off
REFUSED_FIELDS: Unserved = {
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
"""Fields that would change the answer. None turns each off."""

_SAMPLED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "seed",
    "ignore_eos",
)
"""Fields that the body and ``Sampling`` have in common."""
ROOM_TOKENS = (1 << 31) - 1  # as many as there is room for
_OF_TEMPLATE = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
_LEAST_TOP_P = 1e-9  # what OpenAI's 0 means: the most likely token alone
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "grammar", "choice")}
ANY_TOOL = "*"  # the model must call one, whichever


class StreamOptions(msgspec.Struct):
    """Options of a streamed response: ``usage`` in a last chunk, or in each one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that the bodies of chats, completions and responses have in common."""

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
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    deadline_s: float | None = None
    return_token_ids: bool | None = None


class FormFields(SamplingFields, kw_only=True):
    """Fields of chats and completions that bind an output to a form, besides those of all bodies."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None


class ChatBody(FormFields, kw_only=True):
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


class CompletionBody(FormFields, kw_only=True):
    """Body of a completion of raw text."""

    prompt: str | list[str]
    logprobs: int | None = None


class ToolChoice(msgspec.Struct):
    """Tools that the model may call.

    - ``definitions`` (none): for the chat template.
    - ``schemas`` (none): of each tool's parameters, by its name.
    - ``forced`` (""): tool that must be called; ``ANY_TOOL`` for any of them.
    """

    definitions: list[dict[str, Any]] = []
    schemas: dict[str, Any] = {}
    forced: str = ""

    def forced_schema(self) -> dict[str, Any]:
        """JSON schema of the output that is the forced call: arguments of a named tool, or name and arguments."""
        if self.forced != ANY_TOOL:
            return dict(self.schemas[self.forced])
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        return {"anyOf": calls}


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
    return make_call(
        asked,
        "chatcmpl",
        [{"messages": asked.messages, "template_kwargs": _template_kwargs(asked)}],
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=logprobs,
        tools=read_tools(asked.tools, asked.tool_choice),
        form=read_form(asked),
    )


def _template_kwargs(asked: ChatBody) -> dict[str, Any]:
    """Gather what the chat template is told besides the messages."""
    fields = {name: value for name in _OF_TEMPLATE if (value := getattr(asked, name)) is not None}
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
    return make_call(
        asked,
        "cmpl",
        # the whole prompt is the caller's, as a chat template's text is the model's
        [{"prompt": text, "special_tokens": True} for text in texts],
        max_tokens=16 if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs,
        form=read_form(asked),
    )


def make_call(
    asked: SamplingFields,
    kind: str,
    prompts: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    form: Form | None,
    tools: ToolChoice | None = None,
) -> ParsedCall:
    """Make the call of a body: a request for each prompt, of its own fields and of those that all bodies have.

    - ``kind``: what the requests' names begin with.
    - ``prompts``: fields of ``Request`` that are each prompt's own.
    - ``form`` (None): that is asked for; a call that is demanded has its own.
    """
    tools = tools or ToolChoice()
    sampling, name = make_sampling(asked, logprobs, bind_output(form, tools)), new_id(kind)
    requests = [
        make_request(
            **prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            deadline_s=asked.deadline_s,
            request_id=f"{name}-{index}" if index else name,
            tools=tools.definitions or None,
            cache_salt=asked.cache_salt or "",
        )
        for index, prompt in enumerate(prompts)
    ]
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
        tools=tools,
    )


def read_fields(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Convert a body into its struct. Raises ``RequestError`` for a wrong type and for a field that is not served."""
    refuse_fields(body, REFUSED_FIELDS)
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise RequestError(str(error).replace("`", "")) from None


def refuse_fields(body: Mapping[str, Any], refused: Unserved, advice: str = "; leave it out") -> None:
    """Raise ``RequestError`` for a field that is not served, unless its value is one of those that turn it off."""
    for name in refused.keys() & body.keys():
        if body[name] is not None and not any(body[name] == off for off in refused[name]):
            raise RequestError(f"{name} is not served here{advice}")


def make_sampling(asked: SamplingFields, logprobs: int | None, form: Form | None = None) -> Sampling:
    """Make the sampling that a body asks for; what it leaves open, the checkpoint says."""
    fields: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(asked, name)) is not None}
    if fields.get("top_k") == -1:  # vLLM's word for off
        fields["top_k"] = 0
    if "top_p" in fields:
        fields["top_p"] = max(fields["top_p"], _LEAST_TOP_P) if fields["top_p"] >= 0 else fields["top_p"]
    if asked.stop:
        fields["stop"] = (asked.stop,) if isinstance(asked.stop, str) else asked.stop
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


# ---------------------------------------------------------------- tools and the call that is demanded


def read_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> ToolChoice:
    """Read OpenAI's ``tools`` and ``tool_choice``. Raises ``RequestError`` that names the field at fault."""
    if not tools:
        if choice not in (None, "auto", "none"):
            raise RequestError("tool_choice needs tools")
        return ToolChoice()
    if len(tools) > MOST_ITEMS:
        raise RequestError(f"tools has {len(tools)} items; {MOST_ITEMS} are allowed")
    schemas = dict(_read_tool(tool) for tool in tools)
    if choice == "none":
        return ToolChoice()
    return ToolChoice([dict(tool) for tool in tools], schemas, _forced(choice, schemas))


def _read_tool(tool: Mapping[str, Any]) -> tuple[str, Any]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RequestError('tools must be of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(f"tools: parameters of {name[:40]!r} must be a JSON schema")
    return name, schema or {"type": "object"}


def _forced(choice: Any, schemas: Mapping[str, Any]) -> str:
    if choice in (None, "auto"):
        return ""
    if choice == "required":
        return ANY_TOOL
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise RequestError(f"tool_choice must be auto, none, required, or name one of the tools, got {show(choice)}")
    return name


def bind_output(form: Form | None, tools: ToolChoice) -> Form | None:
    """Choose the form of an output: a call that is demanded, else the form that is asked for."""
    if tools.forced and form is not None:
        raise RequestError("give either a form of the output or a tool_choice that demands a call")
    return {"json_schema": tools.forced_schema()} if tools.forced else form


# ---------------------------------------------------------------- forms of an output


def read_form(asked: FormFields) -> Form | None:
    """Read the form that an output must have, if a body names one. Raises ``RequestError`` for two, or a bad one."""
    named = (_read_response_format(asked.response_format), _read_structured(asked.structured_outputs))
    found = [form for form in named if form is not None]
    found += [_READERS[kind](value) for name, kind in _GUIDED.items() if (value := getattr(asked, name)) is not None]
    if len(found) > 1:
        raise RequestError("give one of response_format, structured_outputs and guided_...: an output has one form")
    return found[0] if found else None


def read_text_format(given: Mapping[str, Any] | None) -> Form | None:
    """Read the ``text.format`` of a response: as ``response_format``, its schema one level higher."""
    if given is None or given.get("type") != "json_schema":
        return _read_response_format(given)
    return _read_response_format({"type": "json_schema", "json_schema": given})


def _read_response_format(given: Any) -> Form | None:
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": {...}}}'
        )
    return {"json_schema": dict(schema)}


def _read_structured(given: Any) -> Form | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError("structured_outputs must be an object")
    found = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(found) != 1:
        raise RequestError(f"structured_outputs must have one of {', '.join(_READERS)}")
    ((name, value),) = found.items()
    if name not in _READERS:
        raise RequestError(f"structured_outputs: {name[:40]!r} is not served here; known: {', '.join(_READERS)}")
    return _READERS[name](value)


def _read_json(value: Any) -> Form:
    if not isinstance(value, (str, Mapping)):
        raise RequestError("guided_json must be a JSON schema")
    return {"json_schema": value if isinstance(value, str) else dict(value)}


def _read_choice(value: Any) -> Form:
    """Write a list of texts as a grammar of one rule."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not value or not all(isinstance(each, str) and each for each in value):
        raise RequestError("guided_choice must be a list of texts")
    if sum(map(len, value)) <= MOST_GRAMMAR:
        grammar = "start: " + " | ".join(json.dumps(each) for each in value)
        if len(grammar) <= MOST_GRAMMAR:
            return {"grammar": grammar}
    raise RequestError(
        f"guided_choice has more than {MOST_GRAMMAR} characters as a grammar, where each text is quoted and escaped; "
        "give fewer or shorter texts"
    )


def _text_reader(field: str) -> Callable[[Any], Form]:
    def read(value: Any) -> Form:
        if not isinstance(value, str) or not value:
            raise RequestError(f"guided_{field} must be text")
        return {field: value}

    return read


_READERS: dict[str, Callable[[Any], Form]] = {
    "json": _read_json,
    "regex": _text_reader("regex"),
    "grammar": _text_reader("grammar"),
    "choice": _read_choice,
    "json_object": lambda value: {"json_object": True},
}
