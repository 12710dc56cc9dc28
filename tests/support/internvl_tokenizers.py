"""Tokenizers as InternVL's checkpoints have them: a model of sentencepiece, and byte-level ones in two formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MEDIA_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
BYTE_LEVEL = ("qwen2", "qwen3", "qwen3_moe", "llama")
_WORDS = ["the", "picture", "describe", "what", "is", "in", "this", "image", "a", "cat", "two", "three", "short"]
_WORDS += ["words", "of", "answer", "and"]
NORMAL, UNKNOWN, CONTROL, OWN, BYTE = 1, 2, 3, 4, 6  # types of pieces


@dataclass(frozen=True)
class Tokens:
    """What a config says of its tokenizer: tokens, the first of those that are special, and ids."""

    count: int
    first_special: int
    bos: int
    eos: int


def write_sentencepiece(folder: Path, *, prefix: bool = False, added: bool = True) -> Tokens:
    """Write a tokenizer as InternLM2's: tokens of a chat have places that the model left free, others come behind.

    ``prefix`` (False): the model puts a space before each text. ``added`` (True): the file names tokens by their id.
    """
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{number:02X}>", BYTE) for number in range(256)]
    pieces += [(piece, NORMAL) for piece in pieces_of_words("▁")]
    first = len(pieces)
    pieces += [(f"[UNUSED_TOKEN_{number}]", OWN) for number in range(3)]
    write_model(folder / "tokenizer.model", pieces, prefix)
    chat = {first: "<|im_end|>", first + 1: "<|im_start|>"}
    behind = dict(enumerate(MEDIA_TOKENS, len(pieces)))
    named = {0: "<unk>", 1: "<s>", 2: "</s>", **chat, **behind}
    config: dict[str, Any] = {
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "tokenizer_class": "InternLM2Tokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 8192,
        "chat_template": "{{ 'of the text model alone' }}",
        "additional_special_tokens": [*chat.values(), *MEDIA_TOKENS],
    }
    if added:
        config["added_tokens_decoder"] = {str(number): describe_token(text) for number, text in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    beside = {text: number for number, text in named.items() if number > 2}
    (folder / "added_tokens.json").write_text(json.dumps(beside))
    return Tokens(len(pieces) + len(MEDIA_TOKENS), first, 1, 2)


def describe_token(text: str) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": text, "special": True, **plain}


def write_model(path: Path, pieces: list[tuple[str, int]], prefix: bool) -> None:
    protocol = import_module("sentencepiece.sentencepiece_model_pb2")
    model = protocol.ModelProto()
    for number, (text, kind) in enumerate(pieces):
        model.pieces.add(piece=text, score=-float(max(0, number - 258)) if kind == NORMAL else 0.0, type=kind)
    model.trainer_spec.model_type = 2  # pairs of bytes
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(model.SerializeToString())


def pieces_of_words(space: str) -> list[str]:
    """List pieces, the most common first: whole words grow letter by letter, so that each is made of two others."""
    grown = [word[:end] for size in range(2, 9) for word in _spaced(space) for end in [size] if len(word) >= size]
    letters = sorted({*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:!?-\n'\"你好", space})
    return list(dict.fromkeys((*grown, *letters)))


def _spaced(space: str) -> list[str]:
    return [*(space + word for word in _WORDS), *_WORDS]


def write_byte_level(folder: Path, text: str) -> Tokens:
    """Write a tokenizer as Qwen's, of a vocabulary and merges, or as Llama 3's, which is one file."""
    alphabet = list(_byte_letters().values())
    grown = [word[:size] for size in range(2, 9) for word in _spaced("Ġ") if len(word) >= size]
    merged = list(dict.fromkeys(grown))
    vocabulary = {piece: number for number, piece in enumerate((*alphabet, *merged))}
    merges = [f"{piece[:-1]} {piece[-1]}" for piece in merged]
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA_TOKENS)
    added = dict(enumerate(names, len(vocabulary)))
    first, end = len(vocabulary), len(vocabulary)
    described = {str(number): describe_token(name) for number, name in added.items()}
    config: dict[str, Any] = {"added_tokens_decoder": described, "model_max_length": 8192, "eos_token": names[0]}
    if text == "llama":
        _write_one_file(folder, vocabulary, merges, added)
        config |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names[0],
            "clean_up_tokenization_spaces": True,
        }
    else:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        config |= {"tokenizer_class": "Qwen2Tokenizer", "pad_token": names[0], "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "added_tokens.json").write_text(json.dumps({name: number for number, name in added.items()}))
    return Tokens(len(vocabulary) + len(added), first, end, end)


def _write_one_file(folder: Path, vocabulary: dict[str, int], merges: list[str], added: dict[int, str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pairs: list[tuple[str, str]] = [(left, right) for left, _, right in (each.partition(" ") for each in merges)]
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(added.values()))
    first = min(added)
    made.post_processor = processors.TemplateProcessing(
        single=f"{added[first]} $A", special_tokens=[(added[first], first)]
    )
    content = json.loads(made.to_str())
    content["model"]["merges"] = merges  # as older libraries write and read them
    (folder / "tokenizer.json").write_text(json.dumps(content))


def _byte_letters() -> dict[int, str]:
    """Return the letter of each byte in GPT-2's alphabet."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [number for number in range(256) if number not in shown]
    return {**{number: chr(number) for number in shown}, **{byte: chr(256 + at) for at, byte in enumerate(hidden)}}
