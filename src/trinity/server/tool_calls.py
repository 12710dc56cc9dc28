"""Tool calls in a model's text, found as it comes: Hermes' and Qwen's tags, Llama's JSON, Qwen Coder's parameters.

A text that turns out to be no call is given back as text: nothing of an output is lost.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from trinity.errors import ConfigError
from trinity.server.fields import ANY_TOOL
from trinity.server.protocol import CalledFunction, ToolCall

Schemas = Mapping[str, Any]  # of each tool's parameters, by its name
ReadCalls = Callable[[str, Schemas], list[CalledFunction]]
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


class CallFinder(Protocol):
    """Finds the calls in one output. ``found``: there was one."""

    found: bool

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text. Returns what of it to show, and calls that are complete."""

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the last text. Returns what is left to show, and the last calls."""


def choose_format(wanted: str, template: str) -> str:
    """Choose how a model writes its calls: as ``wanted``, or under "auto" as its chat template teaches it.

    Returns "" where no known way is in the template.
    """
    if wanted != "auto":
        return wanted
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters": dictionary' in template else ""


def template_of(tokenizer: Any) -> str:
    """Chat template of a tokenizer, "" where it has none or several without a default."""
    found = getattr(tokenizer, "chat_template", None)
    return str(found.get("default", "") if isinstance(found, dict) else found or "")


def make_finder(form: str, schemas: Schemas, forced: str = "") -> CallFinder | None:
    """Make the finder of a format; None for "none". Raises ``ConfigError`` for an unknown one.

    ``forced``: the output is a call by a grammar, of this tool or of any (``ANY_TOOL``), whatever the format.
    """
    if forced:
        return ForcedCallFinder(forced, schemas)
    if form == "none" or not schemas:
        return None
    if form == "llama3_json":
        return WholeCallFinder(schemas)
    readers: dict[str, ReadCalls] = {"hermes": read_hermes, "qwen3_coder": read_qwen3_coder}
    if form not in readers:
        raise ConfigError(f"unknown tool format {form!r}; known: hermes, llama3_json, qwen3_coder, none")
    return TaggedCallFinder(readers[form], schemas)


def read_hermes(text: str, schemas: Schemas) -> list[CalledFunction]:
    """Read ``{"name": ..., "arguments": {...}}``. Returns nothing for text that is no call."""
    call = _decode(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    return [CalledFunction(call["name"], arguments if isinstance(arguments, str) else _encode(arguments))]


def read_qwen3_coder(text: str, schemas: Schemas) -> list[CalledFunction]:
    """Read ``<function=NAME><parameter=KEY>value</parameter></function>``: JSON values where the schema has no text."""
    calls = []
    for name, inner in _FUNCTION.findall(text):
        schema = schemas.get(name.strip())
        properties = schema.get("properties") if isinstance(schema, dict) else None
        kinds = properties if isinstance(properties, dict) else {}
        values = {key.strip(): _read_value(value, kinds.get(key.strip())) for key, value in _PARAMETER.findall(inner)}
        calls.append(CalledFunction(name.strip(), _encode(values)))
    return calls


def _read_value(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    value = _decode(text)
    return text if value is None and text.strip() != "null" else value


class TaggedCallFinder:
    """Finds calls between ``<tool_call>`` and ``</tool_call>``."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, read: ReadCalls, schemas: Schemas) -> None:
        self.found = False
        self._read, self._schemas = read, schemas
        self._kept, self._gap, self._inside, self._searched, self._count = "", "", False, 0, 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        kept, self._kept = self._kept, ""
        kept += text  # of a name of its own, which grows in place
        shown, calls = "", list[ToolCall]()
        while True:
            mark = self.CLOSE if self._inside else self.OPEN
            place = kept.find(mark, max(0, self._searched - len(mark)))
            if place < 0:
                seen = 0 if self._inside else self._safe_length(kept)
                self._kept, self._searched = kept[seen:] if seen else kept, len(kept) - seen
                return shown + kept[:seen], calls
            before, kept, self._searched = kept[:place], kept[place + len(mark) :], 0
            if self._inside:
                text, made = self._close(before, self.CLOSE)
                shown, calls = shown + text, calls + made
            else:
                shown += before.rstrip()
                self._gap = before[len(before.rstrip()) :]
            self._inside = not self._inside

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        shown, calls = self.push(text)
        rest, self._kept = self._kept, ""
        if self._inside:
            text, made = self._close(rest, "")  # a model may end without its last tag
            return shown + text, calls + made
        return shown + ("" if self.found and not rest.strip() else rest), calls

    def _safe_length(self, kept: str) -> int:
        """Length of the text that is surely no beginning of a tag, nor space in front of one."""
        size = next((n for n in range(min(len(kept), len(self.OPEN) - 1), 0, -1) if self.OPEN.startswith(kept[-n:])), 0)
        return len(kept[: len(kept) - size].rstrip())

    def _close(self, inner: str, mark: str) -> tuple[str, list[ToolCall]]:
        """Read what stood between the tags: calls, or the text that it is."""
        made = self._make(inner)
        return "" if made else self._gap + self.OPEN + inner + mark, made

    def _make(self, text: str) -> list[ToolCall]:
        calls = [make_call_of(each, self._count + index) for index, each in enumerate(self._read(text, self._schemas))]
        self._count += len(calls)
        self.found = self.found or bool(calls)
        return calls


class WholeCallFinder:
    """Finds calls that are the whole output: ``{"name": ..., "parameters": {...}}``, several with semicolons between.

    An output that begins with a brace is kept until its end; it is shown where it names no tool of the request.
    """

    def __init__(self, schemas: Schemas) -> None:
        self.found = False
        self._schemas, self._kept, self._plain = schemas, "", False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        if self._plain:
            return text, []
        self._kept += text
        begin = self._kept.lstrip().removeprefix("<|python_tag|>").lstrip()
        if begin and not begin.startswith("{"):
            self._plain, text, self._kept = True, self._kept, ""
            return text, []
        return "", []

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        shown, _ = self.push(text)
        if self._plain:
            return shown, []
        kept, self._kept = self._kept, ""
        calls = self._read(kept.strip().removeprefix("<|python_tag|>"))
        self.found = bool(calls)
        return ("" if calls else kept), [make_call_of(each, index) for index, each in enumerate(calls)]

    def _read(self, text: str) -> list[CalledFunction]:
        """Read all calls of a text; none where any part of it is no call of a known tool."""
        whole = read_hermes(text, self._schemas)
        parts = [whole] if whole else [read_hermes(part, self._schemas) for part in text.split(";")]
        known = all(part and part[0].name in self._schemas for part in parts)
        return [call for part in parts for call in part] if known else []


class ForcedCallFinder:
    """Takes the whole output as one call: of a named tool its arguments, else name and arguments."""

    def __init__(self, forced: str, schemas: Schemas) -> None:
        self.found = False
        self._forced, self._schemas, self._pieces = forced, schemas, list[str]()

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._pieces.append(text)
        return "", []

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        whole = "".join([*self._pieces, text])
        named = self._forced != ANY_TOOL
        calls = [CalledFunction(self._forced, whole)] if named else read_hermes(whole, self._schemas)
        self.found = bool(calls)
        return "" if calls else whole, [make_call_of(call, 0) for call in calls]


def make_call_of(function: CalledFunction, index: int) -> ToolCall:
    """Make the ``index``-th tool call of an output."""
    return ToolCall(id=f"call_{secrets.token_hex(12)}", function=function, index=index)


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
