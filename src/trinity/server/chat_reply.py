"""Chat completions as clients read them: whole, or as chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from trinity.request import Output, Token
from trinity.server.fields import ParsedCall
from trinity.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptDetails,
    TokenUsage,
    ToolCall,
    encode_event,
    encode_json,
    encode_part,
)
from trinity.server.token_texts import TokenTexts
from trinity.server.tool_calls import CallFinder, make_finder

DONE = b"data: [DONE]\n\n"


class ChatReply:
    """The response of one chat completion.

    - ``call``: what was asked.
    - ``model``: name to report.
    - ``texts``: of the model's tokens.
    - ``tool_format``: how the model writes tool calls.
    """

    def __init__(self, call: ParsedCall, model: str, texts: TokenTexts, tool_format: str) -> None:
        self._call, self._model, self._texts, self._format = call, model, texts, tool_format
        self._id, self._created = call.requests[0].request_id, int(time.time())
        self._sent = [0] * call.choices
        self._tokens = [0] * call.choices
        self._finders = [self._make_finder() for _ in range(call.choices)]
        self._prompt: tuple[int, ...] = ()

    def _make_finder(self) -> CallFinder | None:
        return make_finder(self._format, self._call.tools.schemas, self._call.tools.forced)

    # ------------------------------------------------------------ as chunks

    def begin(self, index: int, prompt: tuple[int, ...]) -> bytes:
        """Encode the first chunk of a choice, which names the role."""
        self._prompt = prompt
        return self._chunk(index, ChatDelta("assistant", ""), prompt=prompt if self._call.token_ids else UNSET)

    def add(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Encode tokens of a choice: a chunk each, but for those that add nothing to be seen."""
        return b"".join([self._add(index, token) for token in tokens])

    def _add(self, index: int, token: Token) -> bytes:
        call, text = self._call, token.text
        self._sent[index] += len(text)
        self._tokens[index] += 1
        finder = self._finders[index]
        text, calls = (text, []) if finder is None else finder.push(text)
        if not (text or calls or call.logprobs is not None or call.token_ids):
            return b""
        ids: list[int] | UnsetType = [token.id] if call.token_ids else UNSET
        return self._chunk(index, ChatDelta(None, text, calls or None), None, self._logprobs([token]), ids)

    def end(self, index: int, output: Output) -> bytes:
        """Encode the end of a choice, with the text that no token could bring."""
        finder, text = self._finders[index], output.text[self._sent[index] :]
        calls: list[ToolCall] = []
        if finder is not None:
            text, calls = finder.finish(text)
        reason = "tool_calls" if finder is not None and finder.found else output.finish_reason
        return self._chunk(index, ChatDelta(None, text or None, calls or None), reason)

    def skip(self, index: int, characters: int) -> None:
        """Note that the client of a choice has had so many characters of it from another server."""
        self._sent[index] += characters

    def close(self, outputs: Sequence[Output]) -> bytes:
        """Encode the end of the stream, behind the usage if that was asked for."""
        if not self._call.include_usage:
            return DONE
        return encode_event(self._make_chunk([], count_usage(outputs))) + DONE

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
        ids: list[int] | UnsetType = UNSET,
        prompt: tuple[int, ...] | UnsetType = UNSET,
    ) -> bytes:
        usage: TokenUsage | UnsetType | None = None if self._call.include_usage else UNSET
        if self._call.continuous_usage:
            usage = make_usage(len(self._prompt), sum(self._tokens))
        chunk = self._make_chunk([ChatChunkChoice(index, delta, logprobs, reason, ids)], usage)
        chunk.prompt_token_ids = prompt
        return encode_event(chunk)

    def _make_chunk(self, choices: list[ChatChunkChoice], usage: TokenUsage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if self._call.logprobs is None:
            return None
        found = (self._texts.describe(each.id, each.logprob, each.top_logprobs) for each in tokens)
        return ChatLogprobs([encode_part(each) for each in found])

    # ------------------------------------------------------------ whole

    def whole(self, outputs: Sequence[Output], tokens: Sequence[Sequence[Token]], prompt: tuple[int, ...]) -> bytes:
        """Encode the whole response; ``tokens`` of each output, where log-probabilities are asked for."""
        choices = [self._choice(*each) for each in enumerate(zip(outputs, tokens, strict=True))]
        reply = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=count_usage(outputs),
            prompt_token_ids=prompt if self._call.token_ids else UNSET,
        )
        return encode_json(reply)

    def _choice(self, index: int, made: tuple[Output, Sequence[Token]]) -> ChatChoice:
        output, tokens = made
        finder, text, calls = self._make_finder(), output.text, list[ToolCall]()
        if finder is not None:
            shown, calls = finder.push(text)
            rest, last = finder.finish("")
            text, calls = shown + rest, calls + last
        message = ChatMessage("assistant", None if calls and not text else text, calls or UNSET)
        ids: list[int] | UnsetType = output.token_ids if self._call.token_ids else UNSET
        return ChatChoice(index, message, self._logprobs(tokens), "tool_calls" if calls else output.finish_reason, ids)


def count_usage(outputs: Sequence[Output]) -> TokenUsage:
    """Count the tokens of all outputs; a prompt with several outputs counts once."""
    prompts = {output.request_id.partition(".")[0]: output for output in outputs}.values()
    usage = make_usage(sum(each.prompt_tokens for each in prompts), sum(len(each.token_ids) for each in outputs))
    usage.prompt_tokens_details = PromptDetails(sum(each.cached_tokens for each in prompts))
    return usage


def make_usage(prompt_tokens: int, output_tokens: int) -> TokenUsage:
    """Make the usage of so many tokens."""
    return TokenUsage(prompt_tokens, output_tokens, prompt_tokens + output_tokens)
