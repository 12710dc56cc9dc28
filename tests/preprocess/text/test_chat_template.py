"""What a chat template is given besides messages: tools, their calls, and variables; as transformers gives them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import RequestError
from trinity.errors.plain_values import MOST_PARTS
from trinity.preprocess.media.media_kinds import Placeholder
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text.chat_template import ChatTemplate
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Request

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "name": "ann", "content": "What is the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
]


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llama"))
    made.tokenizer.chat_template = TEMPLATE
    yield made
    made.close()


def documented(processor: RequestProcessor, messages: Any, **options: Any) -> list[int]:
    """Transformers' own route; its documents have arguments as mappings, and text where OpenAI has null."""
    plain = json.loads(json.dumps(messages))
    for message in plain:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    settings = {"tokenize": True, "return_dict": True, "add_generation_prompt": True, **options}
    return list(processor.tokenizer.apply_chat_template(plain, **settings)["input_ids"])


@pytest.mark.parametrize("untrusted", [False, True])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"documents": [{"title": "a", "text": "b"}]}])
def test_tools_and_their_calls_reach_the_template(
    processor: RequestProcessor, variables: dict[str, Any], untrusted: bool
) -> None:
    asked = Request(messages=CHAT, tools=[WEATHER], template_kwargs=variables, untrusted=untrusted, request_id="r")
    wanted = documented(processor, CHAT, tools=[WEATHER], **variables)
    assert list(processor.process(asked).work.prompt) == wanted
    assert "[weather Oslo]" in processor.tokenizer.decode(wanted)


def test_a_last_message_is_continued(processor: RequestProcessor) -> None:
    messages = [{"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La la"}]
    asked = Request(messages=messages, template_kwargs={"continue_final_message": True}, request_id="r")
    found = list(processor.process(asked).work.prompt)
    assert found == documented(processor, messages, continue_final_message=True, add_generation_prompt=False)
    assert processor.tokenizer.decode(found).endswith("La la")


def test_a_template_that_takes_no_tools_says_so() -> None:
    made = RequestProcessor(checkpoint("llama"))
    try:
        with pytest.raises(RequestError, match="takes no tools; leave tools= out"):
            made.process(Request(messages=CHAT[:1], tools=[WEATHER]))
        made.process(Request(messages=CHAT[:1], tools=[]))
    finally:
        made.close()


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "tokenize", "eos_token", "messages", "tools", "max_length", "tokenizer_kwargs"),
        *("conversations", "conversation", "self"),
    ],
)
def test_variables_cannot_replace_the_template_or_what_reads_it(processor: RequestProcessor, name: str) -> None:
    with pytest.raises(RequestError, match=f"template_kwargs cannot set {name}"):
        processor.process(Request(messages=CHAT, template_kwargs={name: "{{ 1 }}"}, request_id="r"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": {"a": 1}}, "tools must be a list"),
        ({"tools": ["weather"]}, "tools must be given by name"),
        ({"template_kwargs": [1]}, "template_kwargs must be given by name"),
        ({"template_kwargs": {1: 2}}, "template_kwargs must be given by name"),
        ({"template_kwargs": {"self": 1}}, "template_kwargs cannot set self"),
        ({"cache_salt": 3}, "cache_salt must be text"),
        ({"untrusted": "yes"}, "untrusted must be True or False"),
        ({"special_tokens": "no"}, "special_tokens must be True or False"),
    ],
)
def test_fields_of_no_use_are_refused_by_name(processor: RequestProcessor, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        processor.process(Request(messages=CHAT[:1], request_id="r", **fields))


@pytest.mark.parametrize("arguments", ["[1]", "3", "{", "nothing", '{"a": ' * 2000])
def test_arguments_of_a_call_must_be_a_json_object(processor: RequestProcessor, arguments: str) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(RequestError, match="arguments of a tool call must be a JSON object"):
        processor.process(Request(messages=[{"role": "assistant", "tool_calls": [call]}], request_id="r"))


def test_content_may_be_null_beside_calls_alone(processor: RequestProcessor) -> None:
    with pytest.raises(RequestError, match="content must be text or a list of parts"):
        processor.process(Request(messages=[{"role": "assistant", "content": None}], request_id="r"))


PARTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content|string }}"
    "{% elif m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'input_audio' %}<sound>{% elif p.type == 'text' %}{{ p.text }};"
    "{% else %}{{ raise_exception('no such part') }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)
HEARD: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "tool", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "y"}]},
]


def with_clips(tokenizer: Any, template: str) -> ChatTemplate:
    placeholder = Placeholder(token="<sound>", marker="<sound>")
    own = copy.copy(tokenizer)
    own.chat_template = template
    return ChatTemplate(None, own, {"audio": placeholder})


def test_a_medium_is_named_as_the_template_does_and_a_tool_answers_in_text(processor: RequestProcessor) -> None:
    template = with_clips(processor.tokenizer, PARTS)
    assert template.render(HEARD, None, {}) == "<sound>a;b;|rainy|"


def test_a_template_that_knows_the_kind_and_reads_parts_is_given_both_as_they_are(processor: RequestProcessor) -> None:
    own = PARTS.replace("input_audio", "audio").replace("m.content|string", "m.content[1].text")
    assert with_clips(processor.tokenizer, own).render(HEARD, None, {}) == "<sound>a;b;|y|"


class Named:
    def __init__(self, found: Any) -> None:
        self.chat_template = found


def test_of_several_templates_the_one_for_tools_is_taken_with_tools() -> None:
    template = ChatTemplate(Named(None), Named({"default": "a", "tool_use": "b tools"}))
    assert (template.find(), template.find(tools=True)) == ("a", "b tools")
    with pytest.raises(PromptProblem, match="chat templates x, y, and none is the default"):
        ChatTemplate(Named({"x": "a", "y": "b"}), Named(None)).find()
    with pytest.raises(PromptProblem, match="no chat template"):
        ChatTemplate(Named(None), Named(None)).find()


def test_values_in_arguments_of_calls_count_as_those_of_the_chat(processor: RequestProcessor) -> None:
    """A text of a MiB held half a million, which took two seconds on a thread, and all calls share the bound."""

    def ask(values: int) -> Request:
        call = {**CALL, "function": {"name": "weather", "arguments": f'{{"city": [{"0," * values}0]}}'}}
        return Request(messages=[{"role": "assistant", "content": None, "tool_calls": [call, call]}])

    processor.process(ask(50))
    with pytest.raises(RequestError, match=f"arguments of tool calls: the request has more than {MOST_PARTS} values"):
        processor.process(ask(MOST_PARTS // 2))
