"""Chat templates that take the content of a message as one string, as Granite Speech's: a medium is its placeholder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.checkpoint_files import checkpoint
from support.sounds import clip
from support.stage_driver import picture
from trinity.errors import RequestError
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.loader import load_processor
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request

STRINGS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] + ' / ' }}{% endfor %}"
SILENT = (  # as Granite 4's: parts are read, and those that are no text pass unseen
    "{% for m in messages %}[{{ m['role'] }}] {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}{% endfor %}{% endif %} / {% endfor %}"
)
TURNS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is said?"}]},
    {"role": "assistant", "content": "Two words."},
    {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
)


def with_template(name: str, template: str, folder: Path) -> Path:
    """The checkpoint with another chat template."""
    directory = Path(shutil.copytree(checkpoint(name), folder / "model"))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def own_ids(directory: Path, chat: list[dict[str, str]], **media: Any) -> list[int]:
    """Ids by transformers alone: the template writes a text, which the processor is given with the media."""
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(directory, local_files_only=True, trust_remote_code=False)
    processor = load_processor(directory, read_config(directory), tokenizer)
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids: list[int] = processor(text=[text], return_tensors="pt", **media)["input_ids"][0].tolist()
    return ids


def ids_of(directory: Path, request: Request) -> list[int]:
    processor = RequestProcessor(directory)
    try:
        return list(processor.process(request).work.prompt)
    finally:
        processor.close()


@pytest.mark.parametrize("template", [STRINGS, SILENT])
def test_a_clip_is_its_placeholder_in_the_string(template: str, tmp_path: Path) -> None:
    directory = with_template("qwen2_audio", template, tmp_path)
    found = ids_of(directory, Request(messages=list(TURNS), media=[Media("audio", clip(1))]))
    marker = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    chat = [
        {"role": "user", "content": f"{marker}What is said?"},
        {"role": "assistant", "content": "Two words."},
        {"role": "user", "content": "Which?"},
    ]
    assert found == own_ids(directory, chat, audio=[clip(1)])


def test_an_image_likewise_and_a_chat_without_media(tmp_path: Path) -> None:
    directory = with_template("llava", STRINGS, tmp_path)
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": " well?"}]
    found = ids_of(directory, Request(messages=[{"role": "user", "content": parts}], images=[picture(1)]))
    assert found == own_ids(directory, [{"role": "user", "content": "Look: <image> well?"}], images=[picture(1)])
    text = ids_of(directory, Request(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]))
    assert text == own_ids(directory, [{"role": "user", "content": "Hi"}])


def test_a_users_own_placeholder_is_still_refused(tmp_path: Path) -> None:
    directory = with_template("llava", STRINGS, tmp_path)
    with pytest.raises(RequestError, match="reserves for media"):
        ids_of(directory, Request(messages=[{"role": "user", "content": "an <image> of mine"}], images=[]))


def test_a_template_that_reads_parts_is_given_parts() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    processor = RequestProcessor(checkpoint("llava"))
    try:
        assert not processor._prompt_reader._template._joins
        assert processor.process(Request(messages=[{"role": "user", "content": parts}], images=[picture(1)])).work.media
    finally:
        processor.close()
