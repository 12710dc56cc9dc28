"""Tool calls found in texts, whole and cut anywhere: the same calls, and no text lost."""

from __future__ import annotations

import json

import pytest

from trinity.server.protocol import ToolCall
from trinity.server.tool_calls import choose_format, make_finder

SCHEMAS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
ROME = ("weather", {"city": "Rome", "days": 2})
CASES = {
    "a call": ("hermes", HERMES, "", [ROME]),
    "text before it": ("hermes", f"I look.\n\n{HERMES}\n", "I look.", [ROME]),
    "two": ("hermes", f"{HERMES}\n{HERMES}", "", [ROME, ROME]),
    "no end": ("hermes", HERMES.removesuffix("</tool_call>"), "", [ROME]),
    "no call": ("hermes", "a < b and <tool", "a < b and <tool", []),
    "no JSON": ("hermes", "x <tool_call>{oops</tool_call> y", "x <tool_call>{oops</tool_call> y", []),
    "parameters": ("qwen3_coder", CODER, "", [("weather", {"city": "12", "days": 3})]),
    "llama": ("llama3_json", LLAMA, "", [("weather", {"city": "Rome"})]),
    "two llamas": ("llama3_json", f"{LLAMA}; {LLAMA}", "", [("weather", {"city": "Rome"})] * 2),
    "another's JSON": ("llama3_json", '{"name": "me", "parameters": {}}', '{"name": "me", "parameters": {}}', []),
    "no JSON at all": ("llama3_json", "Hello {", "Hello {", []),
}


def find(form: str, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    finder = make_finder(form, SCHEMAS)
    assert finder is not None
    found = [finder.push(piece) for piece in pieces] + [finder.finish("")]
    calls = [call for _, each in found for call in each]
    assert finder.found is bool(calls)
    return "".join(text for text, _ in found), calls


@pytest.mark.parametrize("name", CASES)
def test_calls_and_the_text_beside_them(name: str) -> None:
    form, text, shown, expected = CASES[name]
    for size in (len(text), 1, 2, 3, 7):
        seen, calls = find(form, [text[at : at + size] for at in range(0, len(text), size)])
        assert seen == shown, size
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == expected
        assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)


def test_the_template_says_how_calls_are_written() -> None:
    assert choose_format("auto", "... <tool_call>\n{...") == "hermes"
    assert choose_format("auto", "... <tool_call>\n<function=...") == "qwen3_coder"
    assert choose_format("auto", "... <|python_tag|> ...") == "llama3_json"
    assert choose_format("auto", "nothing of the kind") == ""
    assert choose_format("hermes", "") == "hermes"


def test_a_long_text_costs_little() -> None:
    """A call that never ends is looked at once a character, not once a character and character before it."""
    text = "<tool_call>" + "x" * 40_000
    seen, calls = find("hermes", list(text))
    assert (seen, calls) == (text, [])
