"""Loads a checkpoint's tokenizer: one that reads special tokens, also where mistral-common brings one that does not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.preprocess.libraries import how_to_install, library_version

TEKKEN = "tekken.json"
WRITER = "mistral-common"  # writes chats of such checkpoints, and templates for them
_TEKKENIZER = "mistral_common.tokens.tokenizers.tekken"
_OTHER = "MistralCommonBackend"  # transformers' class over mistral-common: no special token is read from a text
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory as transformers does where mistral-common is not installed.

    That is the one in tokenizer.json, or else what transformers makes of tekken.json, with the same ids. Raises what
    transformers raises on malformed files, and ``ConfigError`` where mistral-common lacks what it imports.
    """
    from transformers import PreTrainedTokenizerFast

    found = _load_as_transformers(directory)
    others = any(each.__name__ == _OTHER for each in type(found).__mro__)
    if has_tekken_alone(directory):
        return _convert(directory, begins=others)
    if not others:
        return found
    load = PreTrainedTokenizerFast.from_pretrained
    return load(directory, local_files_only=True, trust_remote_code=False)


def _load_as_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    try:
        return load(directory, local_files_only=True, trust_remote_code=False)
    except ImportError:
        _check_writer()
        raise


def _check_writer() -> None:
    """Raise ``ConfigError`` if mistral-common is installed without what it imports."""
    if not library_version(WRITER):
        return
    try:
        import_module(_TEKKENIZER)
    except ImportError as error:
        said = f"{WRITER} is installed and cannot be imported, so that transformers loads no tokenizer of Mistral's"
        raise ConfigError(f"{said} ({error}): {how_to_install(WRITER)}; or remove it") from error


def has_tekken_alone(directory: Path) -> bool:
    """Tell if tekken.json is a directory's only file of a tokenizer, as in checkpoints of Mistral's own format."""
    return (directory / TEKKEN).is_file() and not any((directory / name).is_file() for name in _FILES)


def _convert(directory: Path, *, begins: bool) -> Any:
    """Convert a tekken.json as transformers does, with special tokens by name and a chat template.

    The template is the one that lies beside it, or else what mistral-common writes of the file where it is installed.
    ``begins``: a text begins with the first special token, as mistral-common has it. A stranger's control tokens are
    tokenized with the text around them (``PromptTokenizer``).
    """
    from transformers.integrations.mistral import convert_tekken_tokenizer

    convert: Any = convert_tekken_tokenizer
    made = convert(str(directory / TEKKEN))
    made.add_bos_token = begins
    made.reads_whole_texts = True
    return made
