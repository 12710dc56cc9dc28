"""Fields that bind an output to a form: ``response_format``, ``structured_outputs``, ``guided_...`` (OpenAI, vLLM)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity.errors import RequestError
from trinity.errors.sampling_values import MOST_GRAMMAR

Form = dict[str, Any]  # keywords of trinity.Structured, exactly one
GUIDED = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


def read_form(body: Mapping[str, Any]) -> Form | None:
    """Read the form that an output must have, if a body names one. Raises ``RequestError`` for two, or a bad one."""
    found = [
        form
        for form in (
            _read_response_format(body.get("response_format")),
            _read_structured(body.get("structured_outputs")),
            *(_read_named(name.removeprefix("guided_"), body.get(name)) for name in GUIDED),
        )
        if form is not None
    ]
    if len(found) > 1:
        raise RequestError("give one of response_format, structured_outputs and guided_...: an output has one form")
    return found[0] if found else None


def read_text_format(given: Mapping[str, Any] | None) -> Form | None:
    """Read the ``text.format`` of a response: as ``response_format``, its schema one level higher."""
    if given is None or given.get("type") != "json_schema":
        return _read_response_format(given)
    return _read_response_format({"type": "json_schema", "json_schema": given})


def _read_response_format(given: Any) -> Form | None:
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    named = given.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": {...}}}'
        )
    return {"json_schema": dict(schema)}


def _read_structured(given: Any) -> Form | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError("structured_outputs must be an object")
    found = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(found) != 1:
        raise RequestError(f"structured_outputs must have one of {', '.join(_READERS)}")
    ((name, value),) = found.items()
    if name not in _READERS:
        raise RequestError(f"structured_outputs: {name[:40]!r} is not served here; known: {', '.join(_READERS)}")
    return _read_named(name, value)


def _read_named(name: str, value: Any) -> Form | None:
    return None if value is None else _READERS[name](value)


def _read_json(value: Any) -> Form:
    if not isinstance(value, (str, Mapping)):
        raise RequestError("guided_json must be a JSON schema")
    return {"json_schema": value if isinstance(value, str) else dict(value)}


def _read_choice(value: Any) -> Form:
    """Write a list of texts as a grammar of one rule."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not value or not all(isinstance(each, str) and each for each in value):
        raise RequestError("guided_choice must be a list of texts")
    if sum(map(len, value)) <= MOST_GRAMMAR:
        grammar = "start: " + " | ".join(json.dumps(each) for each in value)
        if len(grammar) <= MOST_GRAMMAR:
            return {"grammar": grammar}
    raise RequestError(
        f"guided_choice has more than {MOST_GRAMMAR} characters as a grammar, where each text is quoted and escaped; "
        "give fewer or shorter texts"
    )


def _text_reader(field: str) -> Callable[[Any], Form]:
    def read(value: Any) -> Form:
        if not isinstance(value, str) or not value:
            raise RequestError(f"guided_{field} must be text")
        return {field: value}

    return read


_READERS: dict[str, Callable[[Any], Form]] = {
    "json": _read_json,
    "regex": _text_reader("regex"),
    "grammar": _text_reader("grammar"),
    "choice": _read_choice,
    "json_object": lambda value: {"json_object": True},
}
