"""A model's chat template: which one, what it may be given, and the text that it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

from trinity.errors import describe_error
from trinity.preprocess.checkpoint.tokenizer_files import TRIMS_CHATS
from trinity.preprocess.media.media_kinds import Placeholder, part_keys
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.preprocess.text.trimmed_chats import write_trimmed

_TOOLS = re.compile(r"\btools\b")
_OURS = frozenset(  # arguments of apply_chat_template that are no variables of a template
    {
        "chat_template",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class ChatTemplate:
    """Renders chats with a model's own template.

    - ``processor``: the model's; None for a text-only model.
    - ``tokenizer``: the model's.
    - ``placeholders`` (none): by kind of media.

    Some templates take the content of a message as one string, in which a medium is its placeholder (Granite Speech).
    """

    def __init__(
        self, processor: Any, tokenizer: Any, placeholders: Mapping[str, Placeholder] = MappingProxyType({})
    ) -> None:
        self._processor, self._tokenizer, self._placeholders = processor, tokenizer, placeholders

    @property
    def _found(self) -> Any:
        return getattr(self._processor, "chat_template", None) or self._tokenizer.chat_template

    @property
    def sources(self) -> list[str]:
        """All templates that the model has."""
        return list(map(str, self._found.values() if isinstance(self._found, Mapping) else filter(None, [self._found])))

    def find(self, tools: bool = False) -> str:
        """Find the template: of several named ones the default, or the one for tools, as ``get_chat_template`` does.

        Raises ``PromptProblem``.
        """
        found = self._found
        if isinstance(found, Mapping):
            name = "tool_use" if tools and "tool_use" in found else "default"
            if name not in found:
                names = ", ".join(sorted(map(str, found)))
                raise PromptProblem(f"this model has chat templates {names}, and none is the default", media=False)
            found = found[name]
        if not found:
            raise PromptProblem("this model has no chat template; give prompt= instead of messages=", media=False)
        return str(found)

    def _find_for_videos(self, chat: Sequence[Mapping[str, Any]]) -> str | None:
        """Find the template that SmolVLM's processor takes for chats with videos, whatever the checkpoint's own is."""
        parts = [part for message in chat if isinstance(message["content"], list) for part in message["content"]]
        if not any(part["type"] == "video" for part in parts):
            return None
        homes = [sys.modules.get(each.__module__) for each in type(self._processor).__mro__]
        found = (getattr(home, "DEFAULT_CHAT_TEMPLATE", None) for home in homes if home is not None)
        return next((each for each in found if isinstance(each, str)), None)

    @cached_property
    def _named(self) -> dict[str, str]:
        """Types of parts by kind of media, where the template writes a placeholder for these and none for the kind.

        They are OpenAI's, "input_audio" and "audio_url", in templates that mistral-common makes.
        """
        found = {}
        for kind, each in self._placeholders.items():
            names = [kind, *(name for name, (owner, _) in part_keys().items() if owner == kind)]
            name = next((name for name in names if self._writes_one(_describe(name), each.token)), kind)
            if name != kind:
                found[kind] = name
        return found

    @cached_property
    def _joins(self) -> bool:
        """Tell if the template writes no placeholder for a part with a medium, and one for a string that has it."""
        if not self._placeholders or self._named:
            return False
        kind, each = next(iter(self._placeholders.items()))
        return not self._writes_one(_describe(kind), each.token) and self._writes_one(f"{each.marker}x", each.token)

    @cached_property
    def _prints_parts(self) -> bool:
        """Tell if the template writes what a tool answered as a list of parts, where it was given one."""
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "x", "arguments": {}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        answered = {"role": "tool", "tool_call_id": call["id"], "name": "x", "content": _describe("text")[1:]}
        written = self._try([{"role": "user", "content": _describe("text")[1:]}, called, answered])
        return re.search(r"""\{['"]type['"]: ['"]text""", written) is not None

    def _writes_one(self, content: Any, token: str) -> bool:
        return self._try([{"role": "user", "content": content}]).count(token) == 1

    def _try(self, chat: Sequence[Mapping[str, Any]]) -> str:
        """Write a chat; "" if the template refuses it."""
        try:
            return str(self._tokenizer.apply_chat_template(chat, chat_template=self.find(), tokenize=False))
        except Exception:  # templates raise what they like
            return ""

    def _join(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Join the parts of a message to one string."""
        if isinstance(message["content"], str):
            return dict(message)
        parts = [
            part["text"] if part["type"] == "text" else self._placeholders[part["type"]].marker
            for part in message["content"]
        ]
        return {**message, "content": "".join(parts)}

    def _rename(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Name the parts with media as the template does."""
        if isinstance(message["content"], str):
            return dict(message)
        parts = [{**part, "type": self._named.get(part["type"], part["type"])} for part in message["content"]]
        return {**message, "content": parts}

    def render(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        """Write the text of a chat, with the beginning of an answer unless ``variables`` say otherwise.

        Raises ``PromptProblem`` if the template refuses it, takes no tools, or a variable is none of a template's.
        """
        template = self._find_for_videos(chat) or self.find(bool(tools))
        if tools and not _TOOLS.search(template):
            raise PromptProblem("this model's chat template takes no tools; leave tools= out", media=False)
        if taken := sorted({*_OURS, *self._tokenizer.special_tokens_map}.intersection(variables)):
            raise PromptProblem(f"template_kwargs cannot set {', '.join(taken)}; leave it out", media=False)
        if self._placeholders and self._prints_parts:
            chat = [self._join(each) if each["role"] == "tool" else each for each in chat]
        if self._joins:
            chat = list(map(self._join, chat))
        elif self._named:
            chat = list(map(self._rename, chat))
        goes_on = bool(variables.get("continue_final_message"))
        settings = {
            "add_generation_prompt": not goes_on,
            **variables,
            "chat_template": template,
            "tools": tools or None,
        }
        try:
            if getattr(self._tokenizer, TRIMS_CHATS, False):
                write = partial(self._write_part, settings)
                return write_trimmed(chat, write, self._tokenizer.bos_token, goes_on)
            return self._write(chat, settings)
        except PromptProblem:
            raise
        except Exception as exc:  # templates raise jinja errors, or others from the values they get
            raise PromptProblem(
                f"the chat template refuses these messages ({describe_error(exc)})", media=False
            ) from exc

    def _write(self, chat: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(chat, tokenize=False, **settings))

    def _write_part(self, settings: Mapping[str, Any], chat: Sequence[Mapping[str, Any]], goes_on: bool) -> str:
        return self._write(chat, {**settings, "add_generation_prompt": not goes_on, "continue_final_message": goes_on})


def _describe(name: str) -> list[dict[str, str]]:
    """Make the parts of a message with one medium, by the type of its part."""
    return [{"type": name}, {"type": "text", "text": "x"}]
