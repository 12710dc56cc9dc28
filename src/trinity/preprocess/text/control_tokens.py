"""Control tokens in a user's texts: hidden while the chat template runs, then tokenized as plain text.

What counts as one, and what becomes of it, is as in transformers' ``apply_chat_template(sanitize_control_tokens=True)``
(5.23): special tokens, and added ones that the chat template writes; of a model without one, which tells nothing, added
ones that are marks, as Kosmos-2's ``<grounding>`` is. Beyond it, keys of mappings are covered, and texts that only a
template joins to such a token are refused (decision 0065). With the tokenizer of a tekken.json it becomes
what mistral-common makes of it (decision 0107).
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from trinity.preprocess.text.prompt_problem import PromptProblem

T = TypeVar("T")
Trie = dict[str, Any]  # by character; "" marks the end of a text
CHAT_ROLES = ("assistant", "developer", "function", "system", "tool", "user")
_SCHEMA = ("array", "boolean", "integer", "null", "number", "object", "string")  # types of JSON schemas
_WORDS = {*CHAT_ROLES, *_SCHEMA, "text", "image", "video", "audio"}
_NAMING = ("role", "type")  # keys whose values templates compare, and do not write


class ControlTokens:
    """The control tokens of one model.

    - ``tokenizer``: the model's.
    - ``templates``: sources of its chat templates.
    - ``reserved``: further tokens, those that stand for media.
    """

    def __init__(self, tokenizer: Any, templates: Collection[str], reserved: Collection[str] = ()) -> None:
        added = list(tokenizer.added_tokens_decoder.values())
        acts = _is_mark if not templates else partial(_is_written, templates=templates)
        named = {each.content for each in added if each.special or acts(each.content)}
        self.texts: tuple[str, ...] = tuple(sorted(filter(None, {*named, *reserved})))
        self.pattern = re.compile(_write_trie(_make_trie(self.texts)) if self.texts else "(?!)")
        self._joined = "\0".join(self.texts)
        self._starts = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self._ends = frozenset(text[-size:] for text in self.texts for size in range(1, len(text)))
        self._longest = max(map(len, self.texts), default=0)
        normalizer: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        found_after = normalizer is not None and any(each.normalized for each in added if each.content in named)
        self._normalize: Callable[[str], str] | None = normalizer.normalize_str if found_after else None

    def find_fragments(self, text: str) -> tuple[int, int]:
        """Count the characters at either end of a text that are part of a control token."""
        if text in self._joined:
            return len(text), 0
        sizes = range(min(self._longest, len(text)), 0, -1)
        first = next((size for size in sizes if text[:size] in self._ends), 0)
        return first, next((size for size in sizes if text[-size:] in self._starts), 0)

    def check_normalized(self, text: str) -> None:
        """Raise ``PromptProblem`` for a text in which the tokenizer's normalizer would write a control token."""
        if self._normalize is not None:
            before, after = (len(self.pattern.findall(each)) for each in (text, self._normalize(text)))
            if after > before:
                raise PromptProblem("the text becomes a special token of this model as it is normalized", media=False)


def _make_trie(texts: Collection[str]) -> Trie:
    trie: Trie = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return trie


def _write_trie(node: Trie) -> str:
    """Write a regular expression of the longest text in a trie: one step a character, whatever number there is."""
    branches = [re.escape(character) + _write_trie(child) for character, child in node.items() if character]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{body}?" if "" in node else body


def _is_written(token: str, templates: Collection[str]) -> bool:
    return not token.isspace() and any(token in template for template in templates)


def _is_mark(token: str) -> bool:
    """Tell if an added token is a mark, such as ``</doc>``, and no word that somebody has added to a vocabulary."""
    bare = token.strip()
    return bool(bare) and not (bare[0].isalnum() or bare[-1].isalnum()) and any(map(str.isalnum, bare))


class HiddenTokens:
    """Control tokens taken out of one request's texts: a mark that nobody can guess stands for each.

    ``controls``: those of the model.
    """

    def __init__(self, controls: ControlTokens) -> None:
        self._controls = controls
        self._nonce = f"x{secrets.token_hex(8)}x"  # letters and digits: what templates do to texts leaves it as it is
        self._number = {text: number for number, text in enumerate(controls.texts)}
        self._marks = re.compile(rf"{self._nonce}(\d+)x", re.IGNORECASE)

    def hide(self, value: T) -> T:
        """Hide the control tokens in all texts of a value of lists and mappings."""
        return cast(T, _map_texts(value, self._hide_text))

    def _hide_text(self, text: str) -> str:
        self._controls.check_normalized(text)
        return self._controls.pattern.sub(lambda found: self._mark(found[0]), text)

    def _mark(self, token: str) -> str:
        return f"{self._nonce}{self._number[token]}x"

    def hide_ends(self, value: T) -> T:
        """Hide also what a template could join to a control token: fragments of one, at either end of a text."""
        return cast(T, _map_texts(value, self._hide_ends))

    def _hide_ends(self, text: str) -> str:
        bare, mark = text.strip(), f"{self._nonce}0x"
        first, last = self._controls.find_fragments(bare) if bare else (0, 0)
        if not first and not last:
            return text
        inside = bare[first : max(first, len(bare) - last)]
        return text.replace(bare, f"{mark * (first > 0)}{inside}{mark * (last > 0)}")

    def count(self, rendered: str) -> Counter[str]:
        """Count the control tokens that a template wrote."""
        return Counter(self._controls.pattern.findall(rendered))

    def count_hidden(self, text: str) -> int:
        """Count the control tokens that were taken out of a text: each is a token at least, once it is written."""
        return sum(1 for _ in self._marks.finditer(text))

    def split(self, text: str) -> list[str]:
        """Split a text into plain text, hidden token, plain text, and so on."""
        pieces = self._marks.split(text)
        return [self._controls.texts[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces)]


def render_safely(chat: T, tools: Any, hidden: HiddenTokens, render: Callable[[T, Any], str]) -> str:
    """Render a chat with its control tokens hidden. Raises ``PromptProblem`` where its texts would be joined to one."""
    chat, tools = hidden.hide(chat), hidden.hide(tools)
    rendered = render(chat, tools)
    apart, tools_apart = hidden.hide_ends(chat), hidden.hide_ends(tools)
    if (apart, tools_apart) != (chat, tools) and hidden.count(render(apart, tools_apart)) != hidden.count(rendered):
        raise PromptProblem("texts of these messages join to a special token of the model; separate them", media=False)
    return rendered


def check_roles(chat: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``PromptProblem`` for a role that is none of OpenAI's: templates write roles into special tokens."""
    for message in chat:
        if message.get("role") not in CHAT_ROLES:
            text = f"a role must be one of {', '.join(CHAT_ROLES)}; got {message.get('role')!r:.80}"
            raise PromptProblem(text, media=False)


def _map_texts(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, str):
        return value if key in _NAMING and value in _WORDS else change(value)
    if isinstance(value, Mapping):
        return {_map_key(each, change): _map_texts(inner, change, each) for each, inner in value.items()}
    return [_map_texts(each, change, key) for each in value] if isinstance(value, (list, tuple)) else value


def _map_key(key: Any, change: Callable[[str], str]) -> Any:
    return change(key) if isinstance(key, str) and not key.isidentifier() else key
