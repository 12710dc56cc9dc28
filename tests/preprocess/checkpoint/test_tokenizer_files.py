"""A tokenizer is that of tokenizer.json, also where mistral-common is installed and tekken.json lies beside it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.tokenization_mistral_common import MistralCommonBackend

from support.any_model.tekken import write_tekken
from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.tokenizer_files import READS_WHOLE_TEXTS, TRIMS_CHATS, load_tokenizer
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text.chat_template import ChatTemplate
from trinity.preprocess.text.grammars import load_fast_tokenizer
from trinity.request import Request

HELLO = Request("Hello there, how are you?")


def ids_of(directory: Path) -> list[int]:
    processor = RequestProcessor(directory)
    try:
        return list(processor.process(HELLO).work.prompt)
    finally:
        processor.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("mistral"), tmp_path / "model"))


def find_tekken() -> Path:
    """A file that mistral-common brings."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data" / "tekken_240911.json"


@pytest.fixture
def by_mistral_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoTokenizer answers as it does with that package and a tekken.json: with a tokenizer of this class."""
    found: Any = MistralCommonBackend.__new__(MistralCommonBackend)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **named: found)


@pytest.mark.usefixtures("by_mistral_common")
def test_the_tokenizer_of_the_json_file_is_taken(directory: Path) -> None:
    assert type(load_tokenizer(directory)).__name__ == "TokenizersBackend"
    assert ids_of(directory) == list(load_tokenizer(directory)(HELLO.prompt)["input_ids"])


@pytest.mark.usefixtures("by_mistral_common")
def test_without_files_it_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be loaded"):
        RequestProcessor(directory)


def test_mistral_common_itself_changes_no_id(directory: Path) -> None:
    pytest.importorskip("mistral_common")
    before = ids_of(directory)
    shutil.copy(find_tekken(), directory / "tekken.json")
    load: Any = transformers.AutoTokenizer.from_pretrained
    assert isinstance(load(directory, local_files_only=True, trust_remote_code=False), MistralCommonBackend)
    assert ids_of(directory) == before
    assert load_fast_tokenizer(directory) is not None


def test_a_tokenizer_made_of_tekken_alone_has_the_ids_of_mistral_common(directory: Path) -> None:
    pytest.importorskip("mistral_common")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    shutil.copy(find_tekken(), directory / "tekken.json")
    load: Any = transformers.AutoTokenizer.from_pretrained
    theirs = load(directory, local_files_only=True, trust_remote_code=False)
    assert isinstance(theirs, MistralCommonBackend)
    ours = load_tokenizer(directory)
    for text in (HELLO.prompt, " 12 apples\n\n\tof  été, 日本語 🚢", "def f(x):\n    return x"):
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]


def test_such_a_tokenizer_has_special_tokens_by_name_and_the_template_beside_it(directory: Path) -> None:
    """A text begins as with mistral-common, where that is here, and else as without."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    write_tekken(directory)
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    found = load_tokenizer(directory)
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<s>", "</s>", "<pad>")
    chat = [{"role": "user", "content": "the"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<s>the"
    load: Any = transformers.AutoTokenizer.from_pretrained
    theirs = load(directory, local_files_only=True, trust_remote_code=False)
    assert found("the thing")["input_ids"] == theirs("the thing")["input_ids"]
    assert (found("the")["input_ids"][0] == found.bos_token_id) is isinstance(theirs, MistralCommonBackend)


@pytest.mark.parametrize("name", ["mistral", "llama"])
def test_tekken_alone_is_read_once_and_begins_texts_as_transformers_has_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a type whose chats mistral-common writes where it is installed, and of one that it does not know."""
    directory = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).unlink()
    write_tekken(directory)
    auto: Any = transformers.AutoTokenizer
    theirs = auto.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    monkeypatch.delattr(auto, "from_pretrained")
    found = load_tokenizer(directory)
    assert found("the thing")["input_ids"] == theirs("the thing")["input_ids"]
    assert getattr(found, TRIMS_CHATS) is isinstance(theirs, MistralCommonBackend)
    assert getattr(found, READS_WHOLE_TEXTS)


def test_answers_are_trimmed_where_their_writer_does_so_alone(directory: Path) -> None:
    """A template of the checkpoint's own is heeded as it is where nothing of mistral-common's stands behind it."""
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b  "}, {"role": "user", "content": "c"}]
    setattr(tokenizer, READS_WHOLE_TEXTS, True)
    assert ChatTemplate(None, tokenizer).render(chat, None, {}) == "a|b  |c|"
    setattr(tokenizer, TRIMS_CHATS, True)
    assert ChatTemplate(None, tokenizer).render(chat, None, {}) == "a|b|c|"


WITHOUT = """
import sys
sys.modules["tiktoken"] = None
from pathlib import Path
from trinity.errors import ConfigError
from trinity.preprocess.processor import RequestProcessor
try:
    RequestProcessor(Path(sys.argv[1]))
except ConfigError as error:
    print(" ".join(str(error).split()))
"""


def test_a_mistral_common_without_what_it_imports_is_told_of(directory: Path) -> None:
    pytest.importorskip("mistral_common")
    command = [sys.executable, "-c", WITHOUT, str(directory)]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=True)
    assert "mistral-common is installed and cannot be imported" in done.stdout
    assert "tiktoken, pydantic-extra-types and pycountry; or remove it" in done.stdout
