"""Tools of a request: their definitions for the chat template, their schemas, and the call that a client demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trinity.errors import RequestError, show
from trinity.errors.plain_values import MOST_ITEMS

ANY_TOOL = "*"  # the model must call one, whichever


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
