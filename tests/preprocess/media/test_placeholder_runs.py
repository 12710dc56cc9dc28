"""Runs of placeholders: the ids are the tokenizer's own, whatever stands around them, and it reads little."""

from __future__ import annotations

from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity.preprocess.media.media_kinds import RunTokenizer
from trinity.testing.checkpoints import ARCHITECTURES

MULTIMODAL = tuple(name for name in ARCHITECTURES if name not in ("llama", "mistral"))
AROUND = (
    "{0}",
    " {0} ",
    "a{0}b",
    "one\n\n{0}\n\ntwo {0}{0} three",
    "{0}\n{0}",
    "x {0}y{0} z",
    "<{0}>",
    "ünïcödé{0}你好 🙂{0}",
    "none at all",
    "",
)


class Words:
    """A tokenizer: a word is an id, its place in the list; ``joined`` words become one where they meet."""

    def __init__(self, joined: bool = False) -> None:
        self.words, self.joined, self.read = ["a", "b", "IMG", "IMGIMG", "VID", "IMGS"], joined, list[str]()

    def convert_ids_to_tokens(self, number: int) -> str:
        return self.words[number]

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[int]]:
        self.read.append(text)
        found, known = list[int](), ["IMGS", "VID", "IMG", "a", "b"]
        if self.joined:
            known.insert(0, "IMGIMG")
        while text := text.strip():
            word = next(each for each in known if text.startswith(each))
            found.append(self.words.index(word))
            text = text.removeprefix(word)
        return {"input_ids": found}

    def ids(self, text: str) -> list[int]:
        return self(text)["input_ids"]


def tokenizer_of(name: str) -> tuple[Any, list[int]]:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint(name))
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")]
    return AutoTokenizer.from_pretrained(checkpoint(name)), [each for each in named if each is not None]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    tokenizer, placeholders = tokenizer_of(name)
    runs, read = RunTokenizer(tokenizer, placeholders), list[str]()

    def tokenise(text: str) -> list[int]:
        read.append(text)
        found: list[int] = tokenizer(text)["input_ids"]
        return found

    for number in placeholders:
        token = tokenizer.convert_ids_to_tokens(number)
        for text in AROUND:
            for count in (1, 2, 300):
                whole = text.format(token * count)
                del read[:]
                assert runs.tokenize(whole, tokenise) == tokenizer(whole)["input_ids"], (text, count)
                assert len(read) == 1, "no text of these is read twice"
                assert len(read[0]) <= len(text.format(token * 4)), "a tokenizer reads one of each run"


def test_runs_of_several_placeholders_side_by_side() -> None:
    words = Words()
    runs, text = RunTokenizer(words, [2, 4]), "aIMGIMGIMGVIDVIDIMGbVIDaIMG"
    expected = words.ids(text)
    del words.read[:]
    assert runs.tokenize(text, words.ids) == expected == [0, 2, 2, 2, 4, 4, 2, 1, 4, 0, 2]
    assert words.read == ["aIMGVIDIMGbVIDaIMG"]


def test_a_placeholder_that_joins_its_neighbour_is_left_in() -> None:
    words = Words(joined=True)
    runs, text = RunTokenizer(words, [2, 4]), "IMGIMGIMG VIDVIDVID"
    assert runs.tokenize(text, words.ids) == words.ids(text) == [3, 2, 4, 4, 4]
    assert words.read[-2] == "IMGIMGIMG VID"


def test_where_a_run_is_part_of_another_token_the_whole_text_is_read() -> None:
    words = Words()
    runs, text = RunTokenizer(words, [2]), "a IMGIMGS b"
    del words.read[:]
    assert runs.tokenize(text, words.ids) == [0, 2, 5, 1]
    assert words.read == ["a IMGS b", text]


def test_without_placeholders_texts_are_read_as_they_are() -> None:
    words = Words()
    assert RunTokenizer(words, []).tokenize("aIMGIMGb", words.ids) == [0, 2, 2, 1]
    assert words.read == ["aIMGIMGb"]
