"""Tokenizers made here, and ids for them: bytes alone, bytes as a last resort, words with a mark, cleaned-up ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the cat sat on the mat. héllo wörld 你好吗 🎉🎈 ça va, n'est-ce pas? the cat\nthe\tmat"] * 3
SPECIAL = ["</s>", "<image>"]


def finished(backend: Tokenizer, **options: bool) -> Any:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<think> é", special=False), AddedToken("▁odd", special=False)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token="</s>", **{"clean_up_tokenization_spaces": False, **options})


def byte_level(**options: bool) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return finished(backend, **options)


def fallback(strip: bool = True, **options: bool) -> Any:
    """As Llama 2's: ▁ for a space, bytes for what the vocabulary lacks, one leading space stripped (not by Gemma's)."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁c", "at", "▁cat", "é", "你"]
    pieces += list("thecatsmo.n,'")
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(dict.fromkeys(pieces))}, [], byte_fallback=True))
    marked = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marked]) if strip else marked
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return finished(backend, **options)


class Windowed(PreTrainedTokenizerFast):
    """One that may do anything as it decodes, so that nothing is known of its tokens by themselves."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **rest: Any) -> Any:
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **rest)


def windowed() -> Any:
    make: Any = Windowed
    backend = byte_level().backend_tokenizer
    return make(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)


def metaspace(**options: bool) -> Any:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", show_progress=False))
    return finished(backend, **options)


def wordpiece(**options: bool) -> Any:
    """As BERT's: words, the rest of a word behind ##, and spaces before punctuation until they are cleaned up."""
    pieces = ["[UNK]", *"thecatsmon.,!?' ", *("##" + letter for letter in "thecatsmon"), "the", "cat", "##at", "n't"]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate([*pieces, "'s", "你"])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return finished(backend, **options)


TIDY = {"clean_up_tokenization_spaces": True}
TWICE = {**TIDY, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
MAKERS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "byte_level_tidy": partial(byte_level, **TIDY),  # as Llama 3's: it says so, and nothing comes of it
    "windowed": windowed,
    "fallback": fallback,
    "fallback_gemma": partial(fallback, strip=False),
    "fallback_tidy": partial(fallback, **TWICE),
    "metaspace": metaspace,
    "metaspace_tidy": partial(metaspace, **TIDY),
    "wordpiece": wordpiece,
    "wordpiece_tidy": partial(wordpiece, **TIDY),
}
NAMES = list(MAKERS)


@cache
def tokenizer(name: str) -> Any:
    return MAKERS[name]()


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Random ids (runs of bytes, of special ids and of one id among them), and ids beyond the vocabulary."""
    size = len(tokenizer(name))
    one = st.integers(0, size + 3)
    single_bytes = st.integers(0, 260)
    few = st.sampled_from([size - 1, size - 2, size - 3, size - 4, 1, 5])
    piece = st.one_of(
        st.lists(one, max_size=12),
        st.lists(single_bytes, max_size=12),
        st.builds(lambda token, n: [token] * n, few | one, st.integers(1, 30)),
        st.sampled_from(["你好", "🎉🎈", "the cat", " the cat sat ", "é", " n't, 's . ' "]).map(
            lambda text: tokenizer(name).encode(text, add_special_tokens=False)
        ),
    )
    return st.lists(piece, max_size=8).map(lambda parts: [token for part in parts for token in part])


cases = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), ids_of(name)))


def decoded_byte(byte: int) -> str:
    """The character under which a byte-level vocabulary lists a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))
