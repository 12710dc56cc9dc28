"""Ids of a tokenizer's special tokens, by the files beside it: they are needed before the tokenizer is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.files import read_regular_file

_MOST_BYTES = 16 << 20  # of a file


def read_token_ids(directory: Path) -> dict[str, int]:
    """Return ids by token, as ``added_tokens.json`` and ``tokenizer_config.json`` name them.

    Raises ``ConfigError`` where one of these files is broken.
    """
    described = read_json_file(directory / "tokenizer_config.json").get("added_tokens_decoder")
    found = {str(text): number for text, number in read_json_file(directory / "added_tokens.json").items()}
    for number, each in described.items() if isinstance(described, dict) else ():
        text = each.get("content") if isinstance(each, dict) else None
        if isinstance(text, str) and isinstance(number, str) and number.isdecimal() and len(number) < 10:
            found[text] = int(number)
    return {text: number for text, number in found.items() if type(number) is int}


def read_json_file(path: Path) -> dict[str, Any]:
    """Read an object of JSON; empty where there is no such file. Raises ``ConfigError`` for a broken or huge one."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_regular_file(path, most=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not valid JSON ({error}); is the checkpoint complete?") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} is not an object of JSON but a {type(content).__name__}")
    return content
