"""PromptReader: a prompt or chat as text around its media, with the control tokens of the user hidden or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from trinity.preprocess.media.media_kinds import LoadedProcessor, Placeholder
from trinity.preprocess.text.chat_template import ChatTemplate
from trinity.preprocess.text.control_tokens import ControlTokens, HiddenTokens, render_safely
from trinity.preprocess.text.prompt import PromptText, build_chat, check_in_front, split_at_markers, split_rendered_chat
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Request


class PromptReader:
    """Reads prompts and chats for one model, from any thread.

    ``loaded``: its tokenizer and processor.
    """

    def __init__(self, loaded: LoadedProcessor) -> None:
        self._placeholders, self._in_front = loaded.placeholders, loaded.in_front
        self._beside = _free_marks(loaded)
        self._template = ChatTemplate(loaded.processor, loaded.tokenizer, loaded.placeholders)
        reserved = {token for each in loaded.placeholders.values() for token in (each.token, *each.reserved)}
        self._controls = ControlTokens(loaded.tokenizer, self._template.sources, reserved)

    def split(self, request: Request, counts: Mapping[str, int]) -> PromptText:
        """Split a request's prompt at its media, of which it has ``counts`` by kind. Raises ``PromptProblem``."""
        text = self._split(request, counts)
        if self._in_front and text.kinds:
            check_in_front(text)
        return text

    def _split(self, request: Request, counts: Mapping[str, int]) -> PromptText:
        act = not request.untrusted if request.special_tokens is None else request.special_tokens
        hidden = None if act else HiddenTokens(self._controls)
        if request.messages is None:
            if not isinstance(request.prompt, str):
                raise PromptProblem(f"prompt must be text, got {type(request.prompt).__name__}", media=False)
            return split_at_markers(request.prompt, self._placeholders, counts, hidden, self._list_checked(counts))
        if isinstance(request.messages, str) or not request.messages:
            raise PromptProblem("messages must be a non-empty list", media=False)
        chat = build_chat(request.messages, self._placeholders, counts, hidden, self._list_checked(counts))
        return split_rendered_chat(self._render(request, chat, hidden), self._placeholders, counts, hidden)

    def _list_checked(self, counts: Mapping[str, int]) -> Mapping[str, Placeholder]:
        """List the markup that a text may not have: not that of a processor which finds an image's tokens by a mask."""
        if self._in_front:
            return {}
        return self._beside if counts else self._placeholders

    def _render(self, request: Request, chat: list[dict[str, Any]], hidden: HiddenTokens | None) -> str:
        if hidden is None:
            return self._template.render(chat, request.tools, request.template_kwargs)
        variables = hidden.hide(request.template_kwargs)
        return render_safely(
            chat, request.tools, hidden, lambda each, tools: self._template.render(each, tools, variables)
        )


def _free_marks(loaded: LoadedProcessor) -> dict[str, Placeholder]:
    """List the markup of a prompt with media, but for marks around placeholders: they see images wherever they are."""
    ids = sorted(loaded.together - loaded.media_token_ids)
    marks = set(loaded.tokenizer.convert_ids_to_tokens(ids)) - {each.token for each in loaded.placeholders.values()}
    return {
        kind: msgspec.structs.replace(each, reserved=tuple(token for token in each.reserved if token not in marks))
        for kind, each in loaded.placeholders.items()
    }
