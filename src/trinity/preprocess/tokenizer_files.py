"""Loads a checkpoint's tokenizer: that of tokenizer.json, also where mistral-common is here to read tekken.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trinity.errors import UnsupportedModel

_OTHER = "MistralCommonBackend"  # transformers' class over mistral-common: no special token is read from text
_FILE = "tokenizer.json"


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory as transformers does, of one for mistral-common too the one in tokenizer.json.

    Raises ``UnsupportedModel`` where there is no other, and what transformers raises on malformed files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    load: Any = AutoTokenizer.from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False)
    if all(each.__name__ != _OTHER for each in type(found).__mro__):
        return found
    if not (directory / _FILE).is_file():
        raise UnsupportedModel(
            f"the tokenizer of {str(directory)!r} is mistral-common's alone (tekken.json), which reads no special "
            f"tokens from a text and writes chats by code; give the checkpoint in transformers' format, with a {_FILE}"
        )
    load = PreTrainedTokenizerFast.from_pretrained
    return load(directory, local_files_only=True, trust_remote_code=False)
