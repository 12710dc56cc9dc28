"""Loads a checkpoint's tokenizer: one that reads special tokens, also where mistral-common brings one that does not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.internvl_chat import has_internvl_chat
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.libraries import how_to_install, library_version

TEKKEN = "tekken.json"
WRITER = "mistral-common"  # writes chats of such checkpoints, and templates for them
READS_WHOLE_TEXTS = "trinity_reads_whole_texts"  # of a tokenizer: no text is cut at a stranger's control token
TRIMS_CHATS = "trinity_trims_chats"  # of a tokenizer: what writes its chats leaves out empty parts and last spaces
_TEKKENIZER = "mistral_common.tokens.tokenizers.tekken"
_OTHER = "MistralCommonBackend"  # transformers' class over mistral-common: no special token is read from a text
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory as transformers does where mistral-common is not installed.

    That is the one in tokenizer.json, or else what transformers makes of tekken.json, with the same ids. Raises what
    transformers raises on malformed files, and ``ConfigError`` where mistral-common lacks what it imports.
    """
    from transformers import PreTrainedTokenizerFast

    if has_internvl_chat(directory):
        from trinity.preprocess.checkpoint.internvl_format import load_internvl_tokenizer

        return load_internvl_tokenizer(directory)
    if has_tekken_alone(directory):
        return _convert(directory, as_written=_is_of_writer(directory))
    found = _load_as_transformers(directory)
    if not any(each.__name__ == _OTHER for each in type(found).__mro__):
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


def _is_of_writer(directory: Path) -> bool:
    """Tell if transformers would load such a directory's tokenizer by mistral-common; it is not loaded for that.

    Raises ``ConfigError`` where that package lacks what it imports.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES as UNTYPED
    from transformers.utils.import_utils import is_mistral_common_available

    names: Any = UNTYPED
    config = read_config(directory)
    loaders = (names.get(config.model_type), getattr(config, "tokenizer_class", None))
    if not (is_mistral_common_available() and _OTHER in loaders):
        return False
    _check_writer()
    return True


def _convert(directory: Path, *, as_written: bool) -> Any:
    """Convert a tekken.json as transformers does, with special tokens by name and a chat template.

    The template is the one that lies beside it, or else what mistral-common writes of the file where it is installed.
    ``as_written``: a text begins with the first special token, and a chat is trimmed (``ChatTemplate``), as
    mistral-common has it. A stranger's control tokens are tokenized with the text around them (``PromptTokenizer``).
    """
    from transformers.integrations.mistral import convert_tekken_tokenizer

    convert: Any = convert_tekken_tokenizer
    made = convert(str(directory / TEKKEN))
    made.add_bos_token = as_written
    setattr(made, TRIMS_CHATS, as_written)
    setattr(made, READS_WHOLE_TEXTS, True)
    return made
