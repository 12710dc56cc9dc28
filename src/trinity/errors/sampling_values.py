"""Sampling values: reads the fields of a ``Sampling`` into bounded values of Python's own types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trinity.errors.arguments import show
from trinity.errors.plain_values import (
    Unfit,
    read_chat,
    read_flag,
    read_text,
    real_between,
    tuple_of,
    whole_between,
)

MOST_COUNTED = (1 << 31) - 1  # counts and token ids; far beyond any context and vocabulary
MOST_NAMED = 1024  # characters of a name or a stop string
_MOST_STOPS = 64  # strings: each token's text is compared with all of them on the loop
_MOST_STOP_TEXT = 1 << 14  # characters of all of them
_MOST_BANNED = 16_384  # token ids of all bad words together
MOST_BIASED = 1024  # token ids: they are uploaded with every step
_MOST_SCHEMA = 1 << 16  # characters: a schema's own compiler has no bound for references that follow each other
MOST_GRAMMAR = 1 << 14  # characters of a regex or a grammar, which need far fewer
_LARGEST = 1e6  # of temperature and penalty: float32 logits stay finite


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """Read strings; one alone is a tuple of one."""
    strings = _STOP_STRINGS(name, (value,) if isinstance(value, str) else value)
    if len(strings) > _MOST_STOPS:
        raise Unfit(f"{name} has {len(strings)} strings; give {_MOST_STOPS} at most")
    if sum(map(len, strings)) > _MOST_STOP_TEXT:
        raise Unfit(f"{name} has more than {_MOST_STOP_TEXT} characters in all; give fewer or shorter strings")
    return strings


def _stop_string(name: str, value: Any) -> str:
    text = read_text(name, value, MOST_NAMED)
    if not text:
        raise Unfit(f"{name} must be a tuple of non-empty strings, got an empty one")
    return text


def _bad_words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Read sequences, of a bounded length in all: they are read, and looked for, on the loop's thread."""
    left = [_MOST_BANNED]

    def read(each: str, sequence: Any) -> tuple[int, ...]:
        ids = _sequence_of_ids(each, sequence)
        left[0] -= len(ids)
        if left[0] < 0:
            raise Unfit(f"{name} has more than {_MOST_BANNED} token ids in all; give fewer")
        return ids

    return tuple_of(read, "sequences of token ids")(name, value)


def _sequence_of_ids(name: str, value: Any) -> tuple[int, ...]:
    sequence = _TOKEN_IDS(name, value)
    if not sequence:
        raise Unfit(f"{name} must be a tuple of sequences of token ids, got an empty one")
    return sequence


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """Read a mapping of token ids to biases, in ascending order of ids."""
    if not isinstance(value, Mapping):
        raise Unfit(f"{name} must be a dict of biases by token id, got {show(value)}")
    many = len(value)
    if many > MOST_BIASED:
        raise Unfit(f"{name} has {many} token ids; {MOST_BIASED} are allowed")
    given = [item for _, item in zip(range(many), value.items(), strict=False)]
    read = {_TOKEN_ID(f"a token id of {name}", token): _BIAS(f"a bias of {name}", bias) for token, bias in given}
    return dict(sorted(read.items()))


def _name(name: str, value: Any) -> str:
    text = read_text(name, value, MOST_NAMED)
    if not text:
        raise Unfit(f"{name} must be a name, got ''")
    return text


def _schema(name: str, value: Any) -> str:
    """Read a JSON schema, as a dict or as text, into JSON text of ours: what follows reads no other."""
    try:
        if isinstance(value, str):
            value = json.loads(read_text(name, value, _MOST_SCHEMA))
        if not isinstance(value, Mapping):
            raise Unfit(f"{name} must be a dict, or one as JSON text, got {show(value)}")
        text = json.dumps(read_chat(name, value, _MOST_SCHEMA), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unfit(f"{name} is no JSON ({str(error)[:200]}); give a JSON schema") from None
    return read_text(name, text, _MOST_SCHEMA)


def _grammar(name: str, value: Any) -> str:
    text = read_text(name, value, MOST_GRAMMAR)
    if not text:
        raise Unfit(f"{name} must not be empty")
    return text


_TOKEN_ID = whole_between(0, MOST_COUNTED)
_BIAS = real_between(-100.0, 100.0)
_TOKEN_IDS: Callable[[str, Any], tuple[int, ...]] = tuple_of(_TOKEN_ID, "token ids")
_STOP_STRINGS: Callable[[str, Any], tuple[str, ...]] = tuple_of(_stop_string, "non-empty strings")
SAMPLING_READERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": real_between(0.0, _LARGEST),
    "top_k": whole_between(0, MOST_COUNTED),
    "top_p": real_between(1e-9, 1.0),
    "min_p": real_between(0.0, 1.0),
    "repetition_penalty": real_between(1 / _LARGEST, _LARGEST),
    "presence_penalty": real_between(-2.0, 2.0),
    "frequency_penalty": real_between(-2.0, 2.0),
    "logit_bias": _logit_bias,
    "no_repeat_ngram_size": whole_between(0, MOST_COUNTED),
    "min_tokens": whole_between(0, MOST_COUNTED),
    "suppress_tokens": _TOKEN_IDS,
    "begin_suppress_tokens": _TOKEN_IDS,
    "bad_words_ids": _bad_words,
    "forced_eos_token_id": _TOKEN_IDS,
    "stop": _stop_strings,
    "stop_token_ids": _TOKEN_IDS,
    "ignore_eos": read_flag,
    "logits_processor": _name,
    "seed": whole_between(-(1 << 63), (1 << 64) - 1),
    "logprobs": whole_between(0, 100),
}
"""A reader of each field that is a plain value; ``Unfit`` if it is out of range."""
STRUCTURED_READERS: dict[str, Callable[[str, Any], Any]] = {
    "json_schema": _schema,
    "regex": _grammar,
    "grammar": _grammar,
    "json_object": read_flag,
}
"""The same for the fields of a ``Structured``."""
