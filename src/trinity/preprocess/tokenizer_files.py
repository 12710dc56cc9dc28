"""Loads a checkpoint's tokenizer: one that reads special tokens, also where mistral-common brings one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_OTHER = "MistralCommonBackend"  # transformers' class over mistral-common: no special token is read from a text


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory as transformers does where mistral-common is not installed.

    That is the one in tokenizer.json, or else what transformers makes of tekken.json, with the same ids. Raises what
    transformers raises on malformed files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    load: Any = AutoTokenizer.from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False)
    if all(each.__name__ != _OTHER for each in type(found).__mro__):
        return found
    load = PreTrainedTokenizerFast.from_pretrained
    return load(directory, local_files_only=True, trust_remote_code=False)
