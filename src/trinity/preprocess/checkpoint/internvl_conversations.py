"""Templates of chats in a checkpoint's ``conversation.py``, read by its syntax: nothing of it is run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file

CONVERSATIONS = "conversation.py"
_MOST_BYTES = 1 << 18  # the published ones have some 20 KB
_MARK = "{system_message}"
_TEMPLATE = """
{%- macro write(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part['type'] == 'image' -%}{{- IMAGE -}}
      {%- elif part['type'] == 'text' -%}{{- part['text'] -}}
      {%- else -%}{{- raise_exception('a message has text and images here, and no ' ~ part['type']) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set own = messages and messages[0]['role'] == 'system' -%}
{%- set turns = messages[1:] if own else messages -%}
{{- BEFORE ~ (write(messages[0]['content']) if own else SYSTEM) ~ BEHIND -}}
{%- for message in turns -%}
  {%- if message['role'] == 'user' -%}{{- USER -}}
  {%- elif message['role'] == 'assistant' -%}{{- ASSISTANT -}}
  {%- else -%}{{- raise_exception('roles are user and assistant, and system first, not ' ~ message['role']) -}}
  {%- endif -%}
  {%- set content = write(message['content']) -%}
  {%- if content -%}{{- content ~ END -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ASSISTANT -}}{%- endif -%}
"""  # words in capitals are a conversation's texts
_STYLE = "MPT"  # the only one of published InternVL 2 and later


class ChatTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Writes chats as one text: system, and then in turn each role with its message, all closed by ``end``.

    - ``before``, ``behind``: texts around the system message.
    - ``system``: message where a chat has none of its own.
    - ``user``, ``assistant``: beginnings of their turns.
    - ``end``: end of a turn. Without spaces around it is the token that ends an output.
    """

    before: str
    behind: str
    system: str
    user: str
    assistant: str
    end: str

    @property
    def end_token(self) -> str:
        return self.end.strip()

    def make_template(self, image: str) -> str:
        """Make the chat template in transformers' language, where ``image`` stands for an image.

        A turn without text is not closed, as in the original.
        """
        texts = {
            "IMAGE": image,
            "BEFORE": self.before,
            "BEHIND": self.behind + self.end,
            "SYSTEM": self.system,
            "USER": self.user,
            "ASSISTANT": self.assistant,
            "END": self.end,
        }
        return re.sub("[A-Z]+", lambda found: _quote(texts[found[0]]), _TEMPLATE)


def _quote(text: str) -> str:
    """Write a text as a literal of Jinja, which reads the escapes that Python does."""
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def read_conversation(directory: Path, name: str) -> ChatTexts:
    """Read the template ``name`` from the ``conversation.py`` of a checkpoint.

    Raises ``ConfigError`` where it is not there, or not written in plain values; ``UnsupportedModel`` for one that puts
    chats together in another way.
    """
    path = directory / CONVERSATIONS
    if not path.is_file():
        raise ConfigError(
            f"{str(directory)!r} has no {CONVERSATIONS}, which says how its chats are written: download it as well. "
            "It is read as text, and never run"
        )
    found = [each for each in _list_calls(path) if each.get("name") == name]
    if len(found) != 1:
        raise ConfigError(f"{str(path)!r} has {len(found)} templates of the name {show(name)} that config.json gives")
    return _check(found[0], name, path)


def _list_calls(path: Path) -> list[dict[str, Any]]:
    """List the arguments of the calls ``Conversation(...)`` of a file, those that are plain values."""
    content = read_regular_file(path, most=_MOST_BYTES)
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({type(error).__name__}); is it complete?") from error
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Conversation"]
    return [{word.arg: _read_value(word.value) for word in call.keywords if word.arg is not None} for call in calls]


def _read_value(node: ast.expr) -> Any:
    """Return a value that is written out; of ``SeparatorStyle.NAME`` the name; None for any other."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(map(_read_value, node.elts))
    return node.attr if isinstance(node, ast.Attribute) else None


def _check(fields: dict[str, Any], name: str, path: Path) -> ChatTexts:
    if fields.get("sep_style") != _STYLE:
        raise UnsupportedModel(
            f"the chat template {show(name)} of {str(path)!r} is of the style {show(fields.get('sep_style'))}, and "
            f"{_STYLE} alone is converted"
        )
    template, system = fields.get("system_template", _MARK), fields.get("system_message", "")
    roles: Any = fields.get("roles")
    roles, end = roles if isinstance(roles, tuple) else (), fields.get("sep", "\n")
    plain = all(isinstance(each, str) for each in (*roles, template, system, end))
    if len(roles) != 2 or not plain or not end.strip():
        raise ConfigError(f"the template {show(name)} of {str(path)!r} is not written in plain texts; is it its own?")
    before, mark, behind = template.partition(_MARK)
    if not mark or set("{}").intersection(before + behind):
        raise ConfigError(f"the system_template of {show(name)} in {str(path)!r} has {_MARK} once, and no other braces")
    return ChatTexts(before=before, behind=behind, system=system, user=roles[0], assistant=roles[1], end=end)
