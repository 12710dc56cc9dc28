"""Completions of raw text as clients read them: whole, or as chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from trinity.request import Output, Token
from trinity.server.chat_reply import DONE, count_usage, make_usage
from trinity.server.fields import ParsedCall
from trinity.server.protocol import (
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenUsage,
    encode_event,
    encode_json,
    encode_part,
)
from trinity.server.token_texts import TokenTexts


class CompletionReply:
    """The response of one completion: choices of the first prompt, then of the next."""

    def __init__(self, call: ParsedCall, model: str, texts: TokenTexts) -> None:
        self._call, self._model, self._texts = call, model, texts
        self._id, self._created = call.requests[0].request_id, int(time.time())
        count = call.choices * len(call.requests)
        self._sent, self._offsets, self._tokens = [0] * count, [0] * count, [0] * count
        self._prompts = [0] * count

    def begin(self, index: int, prompt: tuple[int, ...]) -> bytes:
        """Note a choice's prompt: no chunk is due yet."""
        self._prompts[index] = len(prompt)
        return b""

    def add(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Encode tokens of a choice: a chunk each, but for those that add nothing to be seen."""
        return b"".join([self._add(index, token) for token in tokens])

    def _add(self, index: int, token: Token) -> bytes:
        self._sent[index] += len(token.text)
        self._tokens[index] += 1
        if not (token.text or self._call.logprobs is not None or self._call.token_ids):
            return b""
        ids: list[int] | UnsetType = [token.id] if self._call.token_ids else UNSET
        return self._chunk(TextChoice(index, token.text, self._logprobs(index, [token]), None, ids))

    def end(self, index: int, output: Output) -> bytes:
        """Encode the end of a choice, with the text that no token could bring."""
        return self._chunk(TextChoice(index, output.text[self._sent[index] :], None, output.finish_reason))

    def skip(self, index: int, characters: int) -> None:
        """Note that the client of a choice has had so many characters of it from another server."""
        self._sent[index] += characters

    def close(self, outputs: Sequence[Output]) -> bytes:
        """Encode the end of the stream, behind the usage if that was asked for."""
        if not self._call.include_usage:
            return DONE
        return encode_event(self._make([], count_usage(outputs))) + DONE

    def whole(self, outputs: Sequence[Output], tokens: Sequence[Sequence[Token]], prompt: tuple[int, ...]) -> bytes:
        """Encode the whole response; ``tokens`` of each output, where log-probabilities are asked for."""
        choices = []
        for index, (output, made) in enumerate(zip(outputs, tokens, strict=True)):
            ids: list[int] | UnsetType = output.token_ids if self._call.token_ids else UNSET
            choices.append(TextChoice(index, output.text, self._logprobs(index, made), output.finish_reason, ids))
        return encode_json(self._make(choices, count_usage(outputs)))

    def _chunk(self, choice: TextChoice) -> bytes:
        usage: TokenUsage | UnsetType | None = None if self._call.include_usage else UNSET
        if self._call.continuous_usage:
            usage = make_usage(sum(self._prompts[:: self._call.choices]), sum(self._tokens))
        return encode_event(self._make([choice], usage))

    def _make(self, choices: list[TextChoice], usage: TokenUsage | UnsetType | None) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> TextLogprobs | None:
        if self._call.logprobs is None:
            return None
        found = TextLogprobs([], [], [], [])
        for token in tokens:
            described = self._texts.describe(token.id, token.logprob, token.top_logprobs)
            found.tokens.append(described.token)
            found.token_logprobs.append(described.logprob)
            found.top_logprobs.append(encode_part({each.token: each.logprob for each in described.top_logprobs}))
            found.text_offset.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return found
