"""Chat templates of a conversation.py: read by syntax and never run, written as transformers' templates are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from support.internvl_folders import CONVERSATION, SYSTEM
from trinity.errors import ConfigError, UnsupportedModel
from trinity.preprocess.checkpoint.internvl_format import CONVERSATIONS, ChatTexts, read_conversation


def write(folder: Path, text: str | bytes = CONVERSATION) -> Path:
    (folder / CONVERSATIONS).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def render(found: ChatTexts, chat: list[dict[str, Any]], begins: bool = True) -> str:
    make: Any = render_jinja_template
    (text,), _ = make([chat], chat_template=found.make_template("<i>\n"), add_generation_prompt=begins)
    return str(text)


def spell(found: ChatTexts, chat: list[tuple[str, str]], system: str | None = None) -> str:
    """Put a chat together as the original's style MPT does, whose turns without text are left open."""
    text = found.before + (found.system if system is None else system) + found.behind + found.end
    for role, said in chat:
        text += getattr(found, role) + (said + found.end if said else "")
    return text + found.assistant


def test_texts_are_taken_as_they_are_written(tmp_path: Path) -> None:
    found = read_conversation(write(tmp_path), "tiny-chat")
    assert (found.before, found.behind, found.system) == ("<|im_start|>system\n", "", SYSTEM)
    assert (found.user, found.assistant) == ("<|im_start|>user\n", "<|im_start|>assistant\n")
    assert (found.end, found.end_token) == ("<|im_end|>", "<|im_end|>")
    lines = read_conversation(tmp_path, "tiny-lines")
    assert (lines.system, lines.end, lines.end_token) == ("Short lines.", "<|im_end|>\n", "<|im_end|>")


@pytest.mark.parametrize("name", ["tiny-chat", "tiny-lines"])
@pytest.mark.parametrize("system", [None, "own {braces} {{ 1 }} {% x %}", ""])
def test_chats_are_written_as_the_original_does(name: str, system: str | None, tmp_path: Path) -> None:
    found = read_conversation(write(tmp_path), name)
    turns = [("user", "a \"b\" 'c' \\n {{ d }}"), ("assistant", ""), ("user", "\n 🙂 "), ("assistant", "e")]
    chat = [{"role": role, "content": text} for role, text in turns]
    first = [] if system is None else [{"role": "system", "content": system}]
    assert render(found, [*first, *chat]) == spell(found, turns, system)
    assert render(found, [*first, *chat], begins=False) + found.assistant == spell(found, turns, system)


def test_images_stand_where_the_parts_do(tmp_path: Path) -> None:
    found = read_conversation(write(tmp_path), "tiny-chat")
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert render(found, [{"role": "user", "content": parts}]) == spell(found, [("user", "a<i>\n<i>\nb")])


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}],
        [{"role": "user", "content": [{"type": "video"}]}],
    ],
)
def test_what_the_original_has_no_word_for_is_refused(chat: list[dict[str, Any]], tmp_path: Path) -> None:
    found = read_conversation(write(tmp_path), "tiny-chat")
    with pytest.raises(Exception, match=r"roles are user and assistant|has text and images here"):
        render(found, chat)


def test_nothing_is_run(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    assert read_conversation(write(tmp_path, trap + CONVERSATION), "tiny-chat").system == SYSTEM
    assert not (tmp_path / "ran").exists()


REGISTERED = "register_conv_template(Conversation(name='a', {}))"
PLAIN = "roles=('u', 'a'), sep_style=SeparatorStyle.MPT, sep='x'"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (REGISTERED.format("roles=('u', 'a'), sep_style=SeparatorStyle.CHATML"), UnsupportedModel, "style 'CHATML'"),
        (REGISTERED.format("roles=('u', 'a')"), UnsupportedModel, "style None"),
        (REGISTERED.format("roles=['u', 'a'], sep_style=SeparatorStyle.MPT"), ConfigError, "plain texts"),
        (REGISTERED.format("roles=('u',), sep_style=SeparatorStyle.MPT"), ConfigError, "plain texts"),
        (REGISTERED.format("roles=('u', f()), sep_style=SeparatorStyle.MPT"), ConfigError, "plain texts"),
        (REGISTERED.format("roles=('u', 'a'), sep_style=SeparatorStyle.MPT, sep='\\n'"), ConfigError, "plain texts"),
        (REGISTERED.format(f"{PLAIN}, system_message=f'{{1}}'"), ConfigError, "plain texts"),
        (REGISTERED.format(f"{PLAIN}, system_template='none'"), ConfigError, "system_template"),
        (REGISTERED.format(f"{PLAIN}, system_template='{{system_message}}{{}}'"), ConfigError, "system_template"),
        (2 * (REGISTERED.format(PLAIN) + "\n"), ConfigError, "2 templates of the name 'a'"),
        ("", ConfigError, "0 templates of the name 'a'"),
        ("def (", ConfigError, "cannot be read"),
        (b"\0", ConfigError, "cannot be read"),
        (b"\xff\xfe", ConfigError, "cannot be read"),
        ("-" * 100_000 + "1", ConfigError, "cannot be read"),
        ("(" * 100_000, ConfigError, "cannot be read"),
        ("#" * ((1 << 18) + 1), ConfigError, "more than 262,144 bytes"),
    ],
    ids=lambda each: str(each)[:70],
)
def test_a_file_that_does_not_say_is_refused(text: str | bytes, error: type, said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        read_conversation(write(tmp_path, text), "a")


def test_a_folder_without_the_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no conversation\.py.*download it.*never run"):
        read_conversation(tmp_path, "a")
