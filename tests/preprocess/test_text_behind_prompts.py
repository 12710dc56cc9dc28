"""TextStream behind prompts that end in any way, and where a clean-up follows, against decodes by transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from preprocess.text.test_detokenizer import Counting, cut, run
from support.made_tokenizers import NAMES, ids_of, tokenizer
from trinity.preprocess.text.detokenizer import _SETTLED, TableText, TextStream, make_text

FALLBACK = [name for name in NAMES if name.startswith("fallback")]
TIDY = ["fallback_tidy", "metaspace_tidy", "wordpiece_tidy"]
WINDOWED = [name for name in NAMES if not isinstance(make_text(tokenizer(name), ()), TableText)]
prompts = st.lists(
    st.sampled_from([*"the cn'.", "the cat", " 한국어", "吗", "❤🎉", "\ufffd", " n't", "  ", "</s>"]), max_size=12
).map("".join)


def decode(name: str, ids: list[int]) -> str:
    return str(tokenizer(name).decode(ids, skip_special_tokens=True))


def expected(name: str, prompt: list[int], ids: list[int]) -> str:
    """What the output adds to the prompt's text; all of its own text where either changes the other."""
    before, whole, own = decode(name, prompt), decode(name, prompt + ids), decode(name, ids)
    added = whole[len(before) :] if whole.startswith(before) else own
    return own if bytes_meet(name, prompt, ids) and added not in (own, " " + own) else added


def bytes_meet(name: str, prompt: list[int], ids: list[int]) -> bool:
    """True if an output's byte follows a prompt's: an invalid one makes U+FFFD of each byte of both."""
    before, after = visible_pieces(name, prompt), visible_pieces(name, ids)
    return bool(before and after) and all(re.fullmatch("<0x..>", piece) for piece in (before[-1], after[0]))


def visible_pieces(name: str, ids: list[int]) -> list[str]:
    known = tokenizer(name)
    special = {token for token, entry in known.added_tokens_decoder.items() if entry.special}
    return [piece for token in ids if token not in special and (piece := known.convert_ids_to_tokens(token))]


def read(stream: TextStream, ids: list[int], runs: list[int]) -> str:
    """Read one by one (runs of 0) and several at once."""
    text, at, number = "", 0, 0
    while at < len(ids):
        size = runs[number % len(runs)]
        text += stream.push_all(ids[at : at + size]) if size else stream.push(ids[at])
        at, number = at + max(size, 1), number + 1
    return text + stream.finish()


def encode(name: str, text: str) -> list[int]:
    return list(tokenizer(name).encode(text, add_special_tokens=False))


def bytes_of(name: str, data: bytes) -> list[int]:
    return list(tokenizer(name).convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data]))


written = st.sampled_from(NAMES).flatmap(
    lambda name: st.tuples(st.just(name), prompts.map(lambda text: encode(name, text)), ids_of(name))
)
broken = st.sampled_from(WINDOWED).flatmap(lambda name: st.tuples(st.just(name), ids_of(name), ids_of(name)))
readings = st.lists(st.integers(0, 9), min_size=1, max_size=5)
stops = st.lists(st.text("thecat s\ufffdé你'", min_size=1, max_size=3), max_size=2)


@settings(max_examples=200)
@given(written | broken, readings, stops)
def test_the_text_is_what_the_output_adds(
    case: tuple[str, list[int], list[int]], runs: list[int], stop: list[str]
) -> None:
    """However it is read, and if the prompt ends inside a character or in what a clean-up changes."""
    name, prompt, ids = case
    stream = TextStream(tokenizer(name), tuple(stop), prompt)
    assert read(stream, ids, runs) == cut(expected(name, prompt, ids), stop)


@pytest.mark.parametrize(
    ("name", "prompt", "pieces"),
    [
        ("fallback", [f"<0x{byte:02X}>" for byte in "吗吗吗".encode()], ["<0x20>", "at"]),
        ("wordpiece_tidy", ["the", *["'"] * 8], ["s"]),
        ("wordpiece_tidy", [], [*["the"] * 8, *["'"] * 12, "the"]),
    ],
)
def test_what_belongs_together_may_be_long(name: str, prompt: list[str], pieces: list[str]) -> None:
    """More than the tokens that are kept: a run of bytes, and quotes with spaces that a later one may take away."""
    before, ids = map(tokenizer(name).convert_tokens_to_ids, (prompt, pieces))
    assert run(TextStream(tokenizer(name), (), before), ids) == expected(name, before, ids)


@settings(max_examples=150)
@given(st.sampled_from(FALLBACK[:2]), prompts, st.binary(max_size=9), st.sampled_from(["", "at", "▁the"]), readings)
@example("fallback", "Say it: 한국어", b"", "at", [0])
@example("fallback", "the cat 🎉", b"\xf0", "", [0])
@example("fallback", "the cat\ufffd", b"\x80", "", [0])
@example("fallback", "the cat 吗吗吗", "🎉".encode(), "at", [3])
def test_bytes_are_no_part_of_the_prompts_characters(
    name: str, prompt: str, data: bytes, piece: str, runs: list[int]
) -> None:
    """The text is the output's own, save a space at its beginning."""
    ids = bytes_of(name, data) + tokenizer(name).convert_tokens_to_ids([piece] * (2 * bool(piece)))
    text = read(TextStream(tokenizer(name), (), encode(name, prompt)), ids, runs)
    assert text in (decode(name, ids), " " + decode(name, ids))


@pytest.mark.parametrize("data", ["吗".encode()[:2], b"\x80" * 20])
def test_bytes_of_the_output_join_none_of_the_prompt(data: bytes) -> None:
    """Neither a character that the prompt began, nor an invalid run."""
    prompt, last = encode("fallback", "the cat") + bytes_of("fallback", data), "吗".encode()[2:]
    for more, own in ((last, "\ufffd"), (last + b"\x80", "\ufffd\ufffd"), ("吗".encode(), "吗")):
        ids = bytes_of("fallback", more) + tokenizer("fallback").convert_tokens_to_ids(["at"])
        assert run(TextStream(tokenizer("fallback"), (), prompt), ids) == own + "at"
        assert run(TextStream(tokenizer("fallback"), (), prompt), ids[:-1]) == own


@pytest.mark.parametrize("size", [7, 400])
def test_a_run_of_the_prompt_is_decoded_whole_and_once(size: int) -> None:
    counting: Any = Counting(tokenizer("fallback"))
    prompt, ids = encode("fallback", "the cat" + "吗" * size), encode("fallback", "the cat") * 20
    assert run(TextStream(counting, (), prompt), ids) == expected("fallback", prompt, ids)
    assert max(counting.sizes) <= 3 * size + 2
    assert sum(each > 16 for each in counting.sizes) <= 3  # the prompt's, and the first token's with it


# ---------------------------------------------------------------- what a clean-up may change

_CODE = PreTrainedTokenizerBase.clean_up_tokenization.__code__
PATTERNS = [text for text in _CODE.co_consts if isinstance(text, str) and len(text) < 9]
texts = st.lists(st.sampled_from([*PATTERNS, *"".join(PATTERNS), "x"]), max_size=8).map("".join)


def clean(text: str) -> str:
    return str(PreTrainedTokenizerBase.clean_up_tokenization(tokenizer("wordpiece_tidy"), text))


@settings(max_examples=300)
@given(texts, texts)
@example("'' ' ", ".")
@example("n  ' v", "e")
def test_settled_text_is_not_cleaned_up_later(text: str, more: str) -> None:
    """Patterns are those of the transformers installed: a new one fails here until it is known."""
    assert " ." in PATTERNS
    settled = _SETTLED.match(clean(text))
    assert clean(text + more).startswith(settled.group() if settled else "")


def test_a_clean_up_holds_back_little() -> None:
    stream = TextStream(tokenizer("wordpiece_tidy"))
    words = ["the", ",", "cat", "n", "##o", "n't", "s", "'", "s", ".", "the"]
    shown = [stream.push(token) for token in tokenizer("wordpiece_tidy").convert_tokens_to_ids(words)]
    assert shown == ["the", ",", " cat", "", " no", "n't", " s", "", "'s", ".", " the"]


@pytest.mark.parametrize("name", TIDY)
def test_work_does_not_grow_where_words_are_settled(name: str) -> None:
    counting: Any = Counting(tokenizer(name))
    counting.clean_up_tokenization_spaces = True
    prompt, ids = encode(name, "the cat , "), encode(name, "the cat, the mat") * 50
    assert run(TextStream(counting, (), prompt), ids) == expected(name, prompt, ids)
    assert max(counting.sizes) <= 40
