"""Config of a checkpoint in another's format, as one of transformers' types, with ids of its own tokenizer's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file
from trinity.errors.internvl_chat import CONTEXT_TOKEN, IMAGE_ENDS, convert_config, is_internvl_chat
from trinity.preprocess.checkpoint.internvl_conversations import ChatTexts, read_conversation
from trinity.preprocess.checkpoint.token_files import read_token_ids


def has_internvl_chat(directory: Path) -> bool:
    """Tell if a directory's config.json is of such a format. Raises ``ConfigError`` where it cannot be read."""
    return is_internvl_chat(read_chat_fields(directory))


def read_chat_fields(directory: Path) -> dict[str, Any]:
    """Read config.json; {} where it cannot be read."""
    try:
        found = json.loads(read_regular_file(directory / "config.json", most=1 << 24))
    except (ConfigError, ValueError, RecursionError):
        return {}  # what is wrong with it is said where it is read as a config
    return found if isinstance(found, dict) else {}


def convert_fields(fields: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a config of transformers' own type, with ids of tokens.

    Raises ``UnsupportedModel`` and ``ConfigError`` for what is not converted, and where files are missing.
    """
    converted, ids = convert_config(fields), read_token_ids(directory)
    end = find_conversation(fields, directory).end_token
    for text in (CONTEXT_TOKEN, *IMAGE_ENDS, end):
        number, count = ids.get(text), converted["text_config"].get("vocab_size")
        if number is None or type(count) is not int or not 0 <= number < count:
            raise ConfigError(
                f"the tokenizer in {str(directory)!r} names no token {show(text)} among the {show(count)} of the "
                "model: are tokenizer_config.json and added_tokens.json there, and of this checkpoint?"
            )
    ends = {**converted["text_config"], "eos_token_id": ids[end]}  # the token at which the original stops
    return {**converted, "text_config": ends, "image_token_id": ids[CONTEXT_TOKEN]}


def find_conversation(fields: Mapping[str, Any], directory: Path) -> ChatTexts:
    """Find how a checkpoint writes its chats. Raises ``ConfigError`` and ``UnsupportedModel``."""
    name, system = fields.get("template"), fields.get("system_message")
    if not isinstance(name, str):
        raise ConfigError(f"the config in {str(directory)!r} names no chat template: template is {show(name)}")
    found = read_conversation(directory, name)
    return found if not isinstance(system, str) else ChatTexts(**{**_fields(found), "system": system})


def _fields(found: ChatTexts) -> dict[str, str]:
    return {name: getattr(found, name) for name in found.__struct_fields__}
