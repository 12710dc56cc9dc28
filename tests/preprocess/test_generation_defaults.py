"""What is read of a generation config, and what is refused of one, by name, before anything is loaded."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError, RequestError
from trinity.pipeline import Pipeline
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text.generation_config import (
    FOLLOWED,
    REFUSED_UNLESS,
    WITHOUT_EFFECT,
    GenerationDefaults,
    load_generation_defaults,
)
from trinity.request import PLAIN_GREEDY, Request, Sampling


def folder_with(folder: Path, content: Any) -> Path:
    shutil.copy(checkpoint("llama") / "config.json", folder)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_each_field_of_transformers_is_followed_without_effect_or_refused() -> None:
    """A release of transformers with a new field fails here: decide what it means."""
    make: Any = transformers.GenerationConfig
    known = {name for name in vars(make()) if not name.startswith("_")}
    tables = [FOLLOWED, WITHOUT_EFFECT, frozenset(REFUSED_UNLESS)]
    assert known - frozenset().union(*tables) == set()
    assert frozenset().union(*tables) - known == set(), "fields that transformers has no more"
    assert sum(map(len, tables)) == len(frozenset().union(*tables)), "a field is in one table"


def test_sampling_of_plain_greedy_sets_all_that_a_file_could_set() -> None:
    assert set(PLAIN_GREEDY) < set(Sampling.__struct_fields__)
    unset = {name for name in Sampling.__struct_fields__ if getattr(Sampling(), name) is None}
    in_no_file = {"seed", "logprobs", "logit_bias", "logits_processor", "structured"}
    assert set(PLAIN_GREEDY) == unset - in_no_file
    assert Sampling.greedy(top_k=3, ignore_eos=True) == Sampling(**{**PLAIN_GREEDY, "top_k": 3}, ignore_eos=True)


REFUSED: dict[str, Any] = {
    "num_beams": 4,
    "guidance_scale": 1.5,
    "sequence_bias": [[[3], 1.5]],
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [5, 1.1],
    "encoder_repetition_penalty": 1.2,
    "penalty_alpha": 0.6,
    "max_time": 3.0,
    "forced_bos_token_id": 1,
    "cache_implementation": "quantized",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name_and_served_without_if_told_so(name: str, tmp_path: Path) -> None:
    directory = folder_with(tmp_path, {name: REFUSED[name], "repetition_penalty": 1.2})
    with pytest.raises(ConfigError, match=rf"sets {name}=.*ignore_generation_config=\['{name}'\]"):
        load_generation_defaults(directory)
    assert load_generation_defaults(directory, ignore=[name]).sampling == Sampling.greedy(repetition_penalty=1.2)
    assert load_generation_defaults(directory, ignore=True) == GenerationDefaults()


async def test_a_pipeline_refuses_at_its_start_and_takes_the_option(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    (directory / "generation_config.json").write_text(json.dumps({"num_beams": 3}))
    with pytest.raises(ConfigError, match="num_beams=3"):
        await Pipeline(directory, "PD").start()
    async with Pipeline(directory, "PD", ignore_generation_config=["num_beams"]) as pipe:
        assert (await pipe.complete(Request("Hello", max_tokens=2))).token_ids


OFF = {
    "num_beams": 1,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "top_k": 50,
    "diversity_penalty": 0.0,
    "remove_invalid_values": False,
    "num_return_sequences": 1,
    "pad_token_id": 0,
    "use_cache": True,
    "chat_format": "chatml",  # of no release of transformers
    "alignment_heads": [[1, 2]],
    "cache_implementation": "hybrid",
}


def test_what_is_off_or_has_no_effect_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert load_generation_defaults(folder_with(tmp_path, OFF)).sampling == Sampling.greedy(top_k=50)


BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "a list": [1],
    "a penalty of 0": {"repetition_penalty": 0.0},
    "a penalty in words": {"repetition_penalty": "high"},
    "NaN": '{"temperature": NaN, "do_sample": true}',
    "top_p of 2": {"do_sample": True, "top_p": 2.0},
    "top_k of -1": {"do_sample": True, "top_k": -1},
    "half a token": {"suppress_tokens": [1.5]},
    "one token, no list": {"suppress_tokens": 5},
    "beyond the vocabulary": {"suppress_tokens": [10**6]},
    "a negative token": {"forced_eos_token_id": -1},
    "an empty word": {"bad_words_ids": [[]]},
    "words, no lists": {"bad_words_ids": [3]},
    "a length in words": {"max_length": "long"},
    "no length": {"max_new_tokens": 0},
    "cold": {"do_sample": True, "temperature": 0.0},
    "ngram": {"no_repeat_ngram_size": -1},
    "an empty stop string": {"stop_strings": [""]},
    "a huge number": f'{{"do_sample": true, "top_k": {10**400}}}',
    "nested": '{"sequence_bias": ' + "[" * 5000 + "]" * 5000 + "}",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json|ignore_generation_config"):
        load_generation_defaults(folder_with(tmp_path, BROKEN[name]), vocabulary=300)


@pytest.mark.parametrize("ignore", ["num_beams", ["num_beam"], [3], 7])
def test_what_is_ignored_must_be_fields(ignore: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ignore_generation_config"):
        load_generation_defaults(folder_with(tmp_path, {}), ignore=ignore)


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, Sampling.greedy()),
        ({"temperature": 0.6, "top_k": 20}, Sampling.greedy(top_k=20)),
        ({"do_sample": True}, Sampling.greedy(temperature=1.0, top_k=50)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0}, Sampling.greedy(temperature=0.6)),
        (
            {"do_sample": True, "top_p": 0.9, "min_p": 0.1},
            Sampling.greedy(temperature=1, top_k=50, top_p=0.9, min_p=0.1),
        ),
        ({"forced_eos_token_id": 3, "stop_strings": "\n"}, Sampling.greedy(forced_eos_token_id=(3,), stop=("\n",))),
    ],
)
def test_sampling_is_read_as_generate_reads_it(fields: dict[str, Any], meant: Sampling, tmp_path: Path) -> None:
    assert load_generation_defaults(folder_with(tmp_path, fields)).sampling == meant


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"top_k": -1, "top_p": 1.5, "min_p": -3, "temperature": -1.0}, Sampling.greedy()),
        ({"do_sample": False, "top_p": 0.9, "top_k": -50}, Sampling.greedy(top_p=0.9)),
        ({"do_sample": True, "top_p": 0.0, "top_k": 0}, Sampling.greedy(temperature=1.0, top_p=1e-9)),
        ({"suppress_tokens": [-1], "begin_suppress_tokens": [4, -7]}, Sampling.greedy(begin_suppress_tokens=(4,))),
    ],
)
def test_what_generate_does_not_read_is_no_reason_to_refuse(
    fields: dict[str, Any], meant: Sampling, tmp_path: Path
) -> None:
    """``generate()`` itself takes each of these; it is run on the file beside what is read of it."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    (directory / "generation_config.json").write_text(json.dumps(fields))
    auto: Any = transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto.from_pretrained(directory).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, pad_token_id=0)
    assert load_generation_defaults(directory, vocabulary=300).sampling == meant


def test_lengths() -> None:
    asked, own = Request("a"), Request("a", max_tokens=7)
    assert GenerationDefaults().max_tokens(asked, 10) == 256
    assert GenerationDefaults(max_length=30).max_tokens(asked, 10) == 20
    assert GenerationDefaults(max_length=30, max_new_tokens=5).max_tokens(asked, 29) == 5
    assert GenerationDefaults(max_length=30, max_new_tokens=5).max_tokens(own, 100) == 7
    with pytest.raises(RequestError, match="max_length 30"):
        GenerationDefaults(max_length=30).max_tokens(asked, 30)
    short = GenerationDefaults(min_length=30)
    assert [short.complete(Sampling(), tokens).min_tokens for tokens in (10, 29, 40)] == [20, 1, 0]
    assert short.complete(Sampling(min_tokens=0), 10).min_tokens == 0


def test_token_ids_of_a_request_lie_in_the_vocabulary() -> None:
    processor = RequestProcessor(checkpoint("llama"))
    lists = dict.fromkeys(("suppress_tokens", "forced_eos_token_id", "stop_token_ids"), (5000,))
    for fields in ({"bad_words_ids": ((1, 5000),)}, *({name: ids} for name, ids in lists.items())):
        with pytest.raises(RequestError, match="5000, and the vocabulary has"):
            processor.process(Request("a", sampling=Sampling(**fields)))  # type: ignore[arg-type]
    processor.close()


def test_of_a_text_model_that_writes_its_config_is_read_and_no_file(tmp_path: Path) -> None:
    from transformers import OPTConfig

    directory, writer = folder_with(tmp_path, {"num_beams": 3, "repetition_penalty": 1.9}), OPTConfig(eos_token_id=5)
    assert load_generation_defaults(directory, writer=writer) == GenerationDefaults()
    writer.num_beams = 3
    with pytest.raises(ConfigError, match=r"num_beams=3.*remove it from config\.json, of the text model"):
        load_generation_defaults(directory, writer=writer)
    found = load_generation_defaults(directory, ignore=["num_beams"], writer=writer)
    assert found.sampling == Sampling.greedy()
