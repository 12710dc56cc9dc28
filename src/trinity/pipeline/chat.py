"""Chat messages and plain keywords become a request: ``make_chat_request("What is this?", images=["cat.jpg"])``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from trinity.errors import RequestError
from trinity.errors.arguments import show
from trinity.request import Request, Sampling

Messages = str | Sequence[Mapping[str, Any]]
_TAKEN = frozenset(Request.__struct_fields__) - {"prompt", "messages", "sampling"}
_SAMPLED = frozenset(Sampling.__struct_fields__)


def make_chat_request(messages: Messages, sampling: Sampling | None = None, **fields: Any) -> Request:
    """Make the request of a chat.

    messages: as in ``Request``; or the text of one user message, before which ``images`` and ``media`` stand.
    sampling (None): its choice of tokens.
    fields: fields of ``Request`` and of ``Sampling``, those of ``Sampling`` in place of what ``sampling`` says.

    Raises ``RequestError`` for a field that neither has.
    """
    check_field_names(fields, _TAKEN | _SAMPLED, "those of trinity.Request and trinity.Sampling")
    sampled = {name: value for name, value in fields.items() if name in _SAMPLED}
    taken = {name: value for name, value in fields.items() if name in _TAKEN}
    return Request(
        messages=_user_message(messages, taken) if isinstance(messages, str) else messages,
        sampling=_choose(sampling, sampled, _name_in(fields)),
        **taken,
    )


def check_field_names(fields: Mapping[str, Any], known: Collection[str], taken: str) -> None:
    """Raise ``RequestError`` for a field that is not ``known``; ``taken`` says which are."""
    for name in fields:
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"{near[0]!r} is near" if near else f"{taken} are taken"
            raise RequestError(f"a request has no field {name!r}; {hint}", _name_in(fields))


def _user_message(text: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make one user message: a part for each medium, then the text."""
    parts = [{"type": "image"} for _ in _listed(fields.get("images"))]
    parts += [{"type": getattr(each, "kind", "image")} for each in _listed(fields.get("media"))]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}]


def _listed(value: Any) -> Sequence[Any]:
    """Return a list of media; none of what is no list, which the request's own check refuses by name."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def _choose(sampling: Sampling | None, fields: Mapping[str, Any], request_id: str) -> Sampling:
    if sampling is None:
        return Sampling(**fields)
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling must be a trinity.Sampling, got {show(sampling)}", request_id)
    return msgspec.structs.replace(sampling, **fields)


def _name_in(fields: Mapping[str, Any]) -> str:
    name = fields.get("request_id", "")
    return name if isinstance(name, str) else ""
