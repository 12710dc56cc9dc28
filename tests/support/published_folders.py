"""Writes folders as popular checkpoints are published on the hub: their own files, small sizes, random weights.

Names of files, fields and tensors are those of the hub (``published_models``). config.json and its kin are written as
described there and not by transformers, which would bring them into its newest form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.internvl_tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    describe_token,
    pieces_of_words,
    write_model,
)
from trinity.testing.checkpoints import _scale_weights, _silence
from trinity.testing.checkpoints_recipes import Recipe
from trinity.testing.checkpoints_text import build_tokenizer

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedFolder:
    """Description of one folder.

    - ``model_class``: transformers' class of the model.
    - ``config``, ``processor``, ``image``, ``video``, ``generation``: fields of config.json, processor_config.json,
      preprocessor_config.json, video_preprocessor_config.json, generation_config.json; None: there is no such file.
      In them "@TOKEN" stands for the id of a token, "@@" for the number of all.
    - ``template``, ``template_file``: chat template ("": none), and where it is: a file, or "tokenizer_config.json".
    - ``tokens``: added tokens. ``named``: those that tokenizer_config.json names, such as {"image_token": "<image>"}.
    - ``bos``, ``eos``, ``pad``: tokens. ``starts`` (True): the tokenizer puts ``bos`` in front of a text.
    - ``tokenizer``: further fields of tokenizer_config.json. ``tokenizer_files``: "json" is tokenizer.json, "slow" is
      vocab.json and merges.txt, "sentencepiece" is tokenizer.model, as Llama's.
    - ``names``: patterns of names of tensors in transformers' model, and what they are named in the files.
    - ``left_out``: pattern of tensors that the files lack. ``added``: further tensors, their shapes by name.
    - ``dtype``: of the tensors, but for those that ``wide`` matches, which are float32.
    - ``shards``: number of files of weights. ``pickled`` (False): they are pytorch_model.bin.
    - ``spread``: deviation of embeddings.
    """

    model_class: str
    config: Fields
    image: Fields | None
    processor: Fields | None = None
    video: Fields | None = None
    generation: Fields | None = None
    template: str = ""
    template_file: str = "chat_template.jinja"
    tokens: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    bos: str | None = None
    eos: str = "</s>"
    pad: str = "<pad>"
    starts: bool = True
    tokenizer: Fields = field(default_factory=dict)
    tokenizer_files: str = "json"
    names: tuple[tuple[str, str], ...] = ()
    left_out: str = "$^"
    added: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "bfloat16"
    wide: str = "$^"
    shards: int = 1
    pickled: bool = False
    spread: float = 0.5


def write_folder(published: PublishedFolder, folder: Path, seed: int = 0) -> Path:
    """Write the folder of a description, which is made; returns it."""
    folder.mkdir(parents=True)
    if published.tokenizer_files == "sentencepiece":
        tokenizer = _write_sentencepiece(published, folder)
    else:
        tokenizer = _build_tokenizer(published)
        _write_tokenizer(published, tokenizer, folder)
    files = {
        "config": published.config,
        "processor_config": published.processor,
        "preprocessor_config": published.image,
        "video_preprocessor_config": published.video,
        "generation_config": published.generation,
    }
    for name, fields in files.items():
        if fields is not None:
            _write_json(folder / f"{name}.json", _fill(fields, tokenizer))
    if published.template and published.template_file == "chat_template.jinja":
        (folder / published.template_file).write_text(published.template)
    elif published.template and published.template_file == "chat_template.json":
        _write_json(folder / published.template_file, {"chat_template": published.template})
    _write_weights(published, _name_tensors(published, _build_model(published, folder, tokenizer, seed)), folder)
    return folder


def _build_tokenizer(published: PublishedFolder) -> Any:
    return build_tokenizer(
        bos=published.bos if published.starts else None,
        eos=published.eos,
        pad=published.pad,
        extra=dict(published.named),
        plain=tuple(filter(None, (published.bos, *published.tokens))),
        template=None,
    )


def _write_tokenizer(published: PublishedFolder, tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    added = {
        str(number): {
            "content": each.content,
            "special": True,
            **dict.fromkeys(("lstrip", "normalized", "rstrip"), False),
        }
        for number, each in tokenizer.added_tokens_decoder.items()
    }
    fields: dict[str, Any] = {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(published.tokens),
        "bos_token": published.bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": published.eos,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": published.pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"extra_special_tokens": dict(published.named)} if published.named else {}),
        **published.tokenizer,
    }
    if published.template_file == path.name:
        fields["chat_template"] = published.template
    _write_json(path, fields)
    if published.tokenizer_files == "slow":
        whole = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").unlink()
        _write_json(folder / "vocab.json", whole["model"]["vocab"])
        merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))


def _write_sentencepiece(published: PublishedFolder, folder: Path) -> Any:
    """Write a model of sentencepiece, and what Llama's folders have beside it; the tokenizer that is made of these."""
    from transformers import AutoTokenizer

    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    pieces += [(f"<0x{number:02X}>", BYTE) for number in range(256)]
    pieces += [(piece, NORMAL) for piece in pieces_of_words("▁")]
    write_model(folder / "tokenizer.model", pieces, prefix=True)
    added = dict(enumerate((*published.tokens, published.pad), len(pieces)))
    fields = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {str(number): describe_token(text) for number, text in added.items()},
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "legacy": False,
        "model_max_length": 2048,
        "pad_token": published.pad,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
        **published.tokenizer,
    }
    _write_json(folder / "tokenizer_config.json", fields)
    _write_json(folder / "added_tokens.json", {text: number for number, text in added.items()})
    _write_json(
        folder / "special_tokens_map.json",
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": published.pad, "unk_token": "<unk>"},
    )
    load: Any = AutoTokenizer.from_pretrained
    return load(folder)


def _fill(value: Any, tokenizer: Any) -> Any:
    """Put numbers of tokens where a description names them."""
    if isinstance(value, Mapping):
        return {name: _fill(each, tokenizer) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(each, tokenizer) for each in value]
    if value == "@@":
        return len(tokenizer)
    if isinstance(value, str) and value.startswith("@"):
        number = tokenizer.get_vocab()[value[1:]]
        return int(number)
    return value


def _write_json(path: Path, fields: Any) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _build_model(published: PublishedFolder, folder: Path, tokenizer: Any, seed: int) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, published.model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).float().eval()
    recipe = Recipe(config, kind, tokenizer, embedding_std=published.spread)
    _scale_weights(model, recipe, torch.Generator().manual_seed(seed))
    if not model.all_tied_weights_keys:
        _silence(model, tokenizer)
    return model


def _name_tensors(published: PublishedFolder, model: Any) -> dict[str, torch.Tensor]:
    """Name the tensors of a model as its files do, in the files' dtype."""
    tied, narrow = set(model.all_tied_weights_keys), getattr(torch, published.dtype)
    found = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        for pattern, named in published.names:
            name = re.sub(pattern, named, name)
        if not re.search(published.left_out, name):
            wide = not tensor.is_floating_point() or re.search(published.wide, name)
            found[name] = (tensor if wide else tensor.to(narrow)).contiguous().clone()
    for name, shape in published.added.items():
        found[name] = torch.rand(shape) if len(shape) == 1 else torch.arange(shape[-1]).expand(shape).clone()
    return found


def _write_weights(published: PublishedFolder, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    stem, ending = ("pytorch_model", "bin") if published.pickled else ("model", "safetensors")
    names, count = sorted(tensors), published.shards
    parts = [names[at::count] for at in range(count)]
    files = (
        [f"{stem}-{at + 1:05d}-of-{count:05d}.{ending}" for at in range(count)] if count > 1 else [f"{stem}.{ending}"]
    )
    for file, part in zip(files, parts, strict=True):
        some = {name: tensors[name] for name in part}
        if published.pickled:
            torch.save(some, folder / file)
        else:
            save_file(some, folder / file, metadata={"format": "pt"})
    if count > 1:
        total = sum(each.nbytes for each in tensors.values())
        places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        _write_json(
            folder / f"{stem}.{ending}.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
        )
