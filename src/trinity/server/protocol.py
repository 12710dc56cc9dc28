"""Responses in OpenAI's form, as structs: chats, completions, usage, log-probabilities, models."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct):
    """Part of the prompt that was in the prefix cache, in tokens."""

    cached_tokens: int


class TokenUsage(msgspec.Struct):
    """Tokens of the prompts and of all outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class LikelyToken(msgspec.Struct):
    """A token's text, its bytes and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """A token of the output, and the most likely ones in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's tokens, each an encoded ``TokenLogprob``."""

    content: list[msgspec.Raw]


class CalledFunction(msgspec.Struct):
    """A function that the model calls, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool; ``index`` in chunks."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The model's answer."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response of a chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    object: str = "chat.completion"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """Part of an answer that a chunk adds."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(msgspec.Struct):
    """A chunk's part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's tokens, in columns; ``text_offset`` in characters of the output.

    ``top_logprobs``: of each token the encoded values by text.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[msgspec.Raw] = []
    text_offset: list[int] = []


class TextChoice(msgspec.Struct):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """The response of a completion, or one event of it."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: TokenUsage | UnsetType | None = UNSET


class ServedModel(msgspec.Struct, kw_only=True):
    """An entry of /v1/models; ``max_model_len`` is the context in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "trinity"


class ModelList(msgspec.Struct, kw_only=True):
    """The response of /v1/models."""

    data: list[ServedModel]
    object: str = "list"


_encoder = msgspec.json.Encoder()


def encode_event(value: Any) -> bytes:
    """Encode a server-sent event of one line of data."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


def encode_json(value: Any) -> bytes:
    """Encode a response."""
    return _encoder.encode(value)


def encode_part(value: Any) -> msgspec.Raw:
    """Encode a part of a response by itself: one call for a whole one of many MB would hold all other threads up."""
    return msgspec.Raw(_encoder.encode(value))
