"""Loads a checkpoint's tokenizer: one that reads special tokens, also where mistral-common brings one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEKKEN = "tekken.json"
_OTHER = "MistralCommonBackend"  # transformers' class over mistral-common: no special token is read from a text
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory as transformers does where mistral-common is not installed.

    That is the one in tokenizer.json, or else what transformers makes of tekken.json, with the same ids. Raises what
    transformers raises on malformed files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    load: Any = AutoTokenizer.from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False)
    others = any(each.__name__ == _OTHER for each in type(found).__mro__)
    if has_tekken_alone(directory):
        return _convert(directory, begins=others)
    if not others:
        return found
    load = PreTrainedTokenizerFast.from_pretrained
    return load(directory, local_files_only=True, trust_remote_code=False)


def has_tekken_alone(directory: Path) -> bool:
    """Tell if tekken.json is a directory's only file of a tokenizer, as in checkpoints of Mistral's own format."""
    return (directory / TEKKEN).is_file() and not any((directory / name).is_file() for name in _FILES)


def _convert(directory: Path, *, begins: bool) -> Any:
    """Convert a tekken.json as transformers does, with special tokens by name and a chat template.

    The template is the one that lies beside it, or else what mistral-common writes of the file where it is installed.
    ``begins``: a text begins with the first special token, as mistral-common has it. Control tokens in a user's text
    are for that part of the text as all else (``PromptTokenizer``), so that it is tokenized with what is around them.
    """
    from transformers.integrations.mistral import convert_tekken_tokenizer

    convert: Any = convert_tekken_tokenizer
    made = convert(str(directory / TEKKEN))
    made.add_bos_token = begins
    made.reads_whole_texts = True
    return made
