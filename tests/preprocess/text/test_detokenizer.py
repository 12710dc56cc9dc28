"""TextStream against the tokenizer's own decode of everything, for random ids, bytes, stop strings and prompts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.made_tokenizers import NAMES, byte_level, cases, decoded_byte, metaspace, tokenizer
from trinity.preprocess.text.detokenizer import BYTE_OF, TextStream, backend_decode, find_bytes


def run(stream: TextStream, ids: Sequence[int]) -> str:
    return "".join(stream.push(token) for token in ids) + stream.finish()


def cut(text: str, stop: Sequence[str]) -> str:
    """Text up to the stop string that is complete first, found character by character."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@settings(max_examples=400)
@given(cases)
def test_all_text_is_that_of_one_decode(case: tuple[str, list[int]]) -> None:
    name, ids = case
    assert run(TextStream(tokenizer(name)), ids) == tokenizer(name).decode(ids, skip_special_tokens=True)


@settings(max_examples=200)
@given(cases, st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans())
def test_tokens_in_runs_have_the_text_of_one_by_one(case: tuple[str, list[int]], runs: list[int], stops: bool) -> None:
    """What each run releases is all that is certain by then: a reader who looks on may go over to it at any token."""
    name, ids = case
    stop = ("he", "你") if stops else ()
    together, single = TextStream(tokenizer(name), stop), TextStream(tokenizer(name), stop)
    at = number = 0
    while at < len(ids):
        run_of = ids[at : at + runs[number % len(runs)]]
        assert together.push_all(run_of) == "".join(map(single.push, run_of))
        assert together.stopped == single.stopped
        at, number = at + len(run_of), number + 1
    assert together.push_all([]) == ""
    assert together.finish() == single.finish()


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    for name in ("byte_level", "fallback"):
        known = tokenizer(name)
        names = [f"<0x{b:02X}>" if name == "fallback" else decoded_byte(b) for b in data]
        ids = known.convert_tokens_to_ids(names)
        text = run(TextStream(known), ids)
        assert text == known.decode(ids)
        if name == "byte_level":
            assert text == data.decode("utf-8", errors="replace")


@settings(max_examples=300)
@given(cases, st.lists(st.text("thecat s\ufffdé你", min_size=1, max_size=5), min_size=1, max_size=4))
def test_text_ends_before_the_first_stop_string(case: tuple[str, list[int]], stop: list[str]) -> None:
    name, ids = case
    stream = TextStream(tokenizer(name), tuple(stop))
    whole = tokenizer(name).decode(ids, skip_special_tokens=True)
    assert run(stream, ids) == cut(whole, stop)
    assert stream.stopped == (cut(whole, stop) != whole)
    assert not stream.stopped or stream.push(5) == stream.finish() == ""


@settings(max_examples=200)
@given(cases, st.integers(1, 40))
def test_after_a_prompt_the_text_is_what_the_ids_add(case: tuple[str, list[int]], at: int) -> None:
    name, ids = case
    known = tokenizer(name)
    prompt = known.encode("the cat", add_special_tokens=False) + [known.eos_token_id] * at
    before = known.decode(prompt, skip_special_tokens=True)
    whole = known.decode(prompt + ids, skip_special_tokens=True)
    assert before + run(TextStream(known, prompt_ids=prompt), ids) == whole


def test_a_prompt_that_ends_inside_a_character() -> None:
    known = tokenizer("byte_level")
    ids = known.convert_tokens_to_ids([decoded_byte(b) for b in "a你".encode()])
    assert run(TextStream(known, prompt_ids=ids[:3]), ids[3:]) == "你"


def test_a_prompt_that_ends_in_a_run_of_bytes_is_not_repeated() -> None:
    known = tokenizer("fallback")
    ids = known.convert_tokens_to_ids(["▁cat", *(f"<0x{b:02X}>" for b in "🎉".encode()), "at"])
    assert run(TextStream(known, prompt_ids=ids[:-1]), ids[-1:]) == "at"


# ---------------------------------------------------------------- when text is released


def pushes(stream: TextStream, tokens: list[str]) -> list[str]:
    return [stream.push(token) for token in tokenizer("byte_level").convert_tokens_to_ids(tokens)]


@pytest.mark.parametrize(("name", "invalid"), [("byte_level", ["\ufffd", "c"]), ("windowed", ["", "\ufffdc"])])
def test_complete_characters_come_at_once_and_incomplete_ones_wait(name: str, invalid: list[str]) -> None:
    """A byte that begins no character is known to be none, where bytes are seen; in a window it looks like others."""
    stream = TextStream(tokenizer(name))
    tokens = ["a", *(decoded_byte(b) for b in "你".encode()), "b", decoded_byte(0x80), "c"]
    assert pushes(stream, tokens) == ["a", "", "", "你", "b", *invalid]


def test_tokens_are_looked_up_where_each_is_bytes_of_its_own() -> None:
    for name in NAMES:
        assert (find_bytes(tokenizer(name)) is not None) is name.startswith("byte_level")
    known, read = tokenizer("byte_level"), find_bytes(tokenizer("byte_level"))
    assert read is not None
    ids = known.convert_tokens_to_ids(["Ġthe", "</s>", "<think> é", decoded_byte(0x80)])
    assert list(map(read, ids)) == [b" the", b"</s>", "<think> é".encode(), b"\x80"]
    assert read(len(known) + 3) == b""
    assert sorted(BYTE_OF) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_bytes_that_fall_back_wait_for_the_end_of_their_run() -> None:
    known = tokenizer("fallback")
    stream = TextStream(known)
    ids = known.convert_tokens_to_ids(["▁cat", *(f"<0x{b:02X}>" for b in "🎉".encode()), "at"])
    assert [stream.push(token) for token in ids] == ["cat", "", "", "", "", "🎉at"]


def test_a_possible_stop_string_is_held_back_until_it_is_none() -> None:
    stream = TextStream(tokenizer("byte_level"), ("abc", "bd"))
    assert pushes(stream, list("xabxab")) == ["x", "", "", "abx", "", ""]
    assert not stream.stopped
    assert pushes(stream, ["d", "x"]) == ["a", ""]
    assert stream.stopped


@pytest.mark.parametrize("stop", [("bc", "abc"), ("abc", "bc"), ("bc", "b", "abc")])
def test_the_first_complete_and_then_the_longest_stop_string_counts(stop: tuple[str, ...]) -> None:
    stream = TextStream(tokenizer("byte_level"), stop)
    assert "".join(pushes(stream, list("xabcd"))) == ("xa" if "b" in stop else "x")
    together = TextStream(tokenizer("byte_level"), ("e", "h"))
    assert pushes(together, ["a", "Ġthe"]) == ["a", " t"]
    assert pushes(TextStream(tokenizer("byte_level"), (" the", "h")), ["Ġthe"]) == [" t"]


@settings(max_examples=300)
@given(cases, st.lists(st.text("thecat s\ufffdé你", min_size=1, max_size=5), max_size=2), st.booleans())
def test_what_it_holds_is_what_the_end_would_give(case: tuple[str, list[int]], stop: list[str], together: bool) -> None:
    """At any moment, unless the end itself meets a stop string."""
    name, ids = case
    for end in range(0, len(ids) + 1, 1 + len(ids) // 6):
        stream = TextStream(tokenizer(name), tuple(stop))
        if together:
            stream.push_all(ids[:end])
        else:
            run_on(stream, ids[:end])
        held = stream.holds
        assert (stream.finish() == "") is not held or stream.stopped


def run_on(stream: TextStream, ids: Sequence[int]) -> None:
    for token in ids:
        stream.push(token)


def test_finish_gives_what_was_held_and_only_once() -> None:
    stream = TextStream(tokenizer("byte_level"), ("abc",))
    assert pushes(stream, ["x", "a", "b", decoded_byte(0xE4)]) == ["x", "", "", ""]
    assert stream.finish() == "ab\ufffd"
    assert stream.finish() == ""
    assert not stream.stopped


def test_finish_may_meet_a_stop_string() -> None:
    stream = TextStream(tokenizer("byte_level"), ("\ufffd",))
    assert pushes(stream, ["x", decoded_byte(0xE4)]) == ["x", ""]
    assert stream.finish() == ""
    assert stream.stopped


def test_an_empty_stop_string_stops_nothing() -> None:
    assert run(TextStream(tokenizer("byte_level"), ("",)), [70, 71]) == tokenizer("byte_level").decode([70, 71])


class Counting:
    """A tokenizer that records how many tokens each decode was given."""

    def __init__(self, known: Any) -> None:
        self.known, self.sizes = known, list[int]()

    @property
    def added_tokens_decoder(self) -> Any:
        return self.known.added_tokens_decoder

    def convert_ids_to_tokens(self, ids: int) -> Any:
        return self.known.convert_ids_to_tokens(ids)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        self.sizes.append(len(token_ids))
        return self.known.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("piece", ["a", "\x80", "Ġthe", "</s>"])
def test_work_per_token_does_not_grow_with_the_text(piece: str) -> None:
    known = tokenizer("byte_level")
    counting = Counting(known)
    token = known.convert_tokens_to_ids(decoded_byte(0x80) if piece == "\x80" else piece)
    stream = TextStream(counting, ("zzz",), prompt_ids=[token] * 500)
    for _ in range(1000):
        stream.push(token)
    assert max(counting.sizes, default=0) <= 16
    assert sum(counting.sizes) <= 1000 * 16


def test_work_in_a_long_run_of_bytes_is_linear() -> None:
    counting = Counting(tokenizer("fallback"))
    stream = TextStream(counting)
    byte = tokenizer("fallback").convert_tokens_to_ids("<0x80>")
    assert run(stream, [byte] * 1000) == "\ufffd" * 1000
    assert sum(counting.sizes) <= 1010


def test_special_ids_are_read_once_per_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    known = byte_level()
    TextStream(known)
    monkeypatch.setattr(type(known), "added_tokens_decoder", property(lambda self: pytest.fail("read again")))
    assert run(TextStream(known), [known.eos_token_id, 40]) == known.decode([40])


@pytest.mark.parametrize("name", ["byte_level", "fallback", "metaspace"])
def test_the_backend_decodes_where_transformers_only_passes_it_on(name: str) -> None:
    known = tokenizer(name)
    direct = backend_decode(known)
    assert direct is not None
    for ids in ([5, 6, 7], [len(known) - 4, 5, len(known) + 2], []):
        assert direct(ids) == known.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_does_more_decodes_itself() -> None:
    class Own(PreTrainedTokenizerFast):
        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **rest: Any) -> Any:
            return str(super().decode(token_ids, skip_special_tokens=skip_special_tokens, **rest)).upper()

    make: Any = Own
    own = make(tokenizer_object=tokenizer("byte_level").backend_tokenizer, clean_up_tokenization_spaces=False)
    ids = own.encode("the cat")
    assert run(TextStream(own), ids) == "THE CAT"
    assert backend_decode(own) is None
    assert backend_decode(Counting(own)) is None
    make = PreTrainedTokenizerFast
    tidy = make(tokenizer_object=tokenizer("metaspace").backend_tokenizer, clean_up_tokenization_spaces=True)
    assert backend_decode(tidy) is None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_tokenizer_is_not_kept(wrapped: bool) -> None:
    known = metaspace()
    if wrapped:
        known = Counting(known)
    run(TextStream(known), [5, 6])
    gone = ref(known)
    del known
    gc.collect()
    assert gone() is None
