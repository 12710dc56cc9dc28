"""How outputs end: stop strings, stop ids, the model's own end token, the first token, the context."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.checkpoint_files import checkpoint
from support.recordings import METHODS, Served, oracle, problems, serve
from support.request_cases import TEXT, answers, ask, red
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

pytestmark = pytest.mark.xdist_group("llava")

IMAGE = "<image>\nWhat is in this picture?"


@cache
def _output() -> tuple[tuple[int, ...], str]:
    """Tokens and text of the image's case, which the others stop."""
    tokenizer = oracle("llava")._loaded.tokenizer
    tokens = tuple(oracle("llava").generate(ask("whole", IMAGE, [red()], 48)))
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True)


@cache
def _new_at(low: int) -> int:
    """The index, from ``low`` on, of a token that the output has not held before."""
    tokens, _ = _output()
    return next(index for index in range(low, len(tokens)) if tokens[index] not in tokens[:index])


@cache
def _stop() -> str:
    """Three characters from the middle of the text that do not occur before, over a border between tokens."""
    _, text = _output()
    return next(text[at : at + 3] for at in range(12, len(text)) if text.find(text[at : at + 3]) == at)


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with an ordinary token of that output as the model's end token."""
    directory = tmp_path_factory.mktemp("ending") / "llava"
    shutil.copytree(checkpoint("llava"), directory)
    named = directory / "generation_config.json"
    settings = json.loads(named.read_text(encoding="utf-8"))
    settings["eos_token_id"] = [_output()[0][_new_at(9)]]
    named.write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _requests() -> list[Request]:
    tokens, text = _output()
    whole: dict[str, Any] = {"prompt": IMAGE, "images": [red()], "max_tokens": 48}
    cases = {
        "eos": Sampling(),
        "past eos": Sampling(ignore_eos=True),
        "stop": Sampling(ignore_eos=True, stop=("never said", _stop())),
        "stop at once": Sampling(ignore_eos=True, stop=(text[0],)),
        "stop id": Sampling(ignore_eos=True, stop_token_ids=(tokens[_new_at(5)], 7)),
        "stop id at once": Sampling(ignore_eos=True, stop_token_ids=(tokens[0],)),
    }
    asked = [Request(request_id=name, sampling=sampling, **whole) for name, sampling in cases.items()]
    return [*asked, ask("one token", IMAGE, [red()], 1), ask("text of one token", TEXT, outputs=1)]


@pytest.fixture(scope="module", params=METHODS)
def found(request: pytest.FixtureRequest, ending: Path) -> Served:
    return serve(ending, request.param, [_requests()])


def test_the_models_end_token_ends_it_as_in_generate(found: Served, ending: Path) -> None:
    output = found.outputs["eos"]
    assert output.token_ids == _eos_answer(ending)
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == _new_at(9) + 1 < 48


@cache
def _eos_answer(ending: Path) -> list[int]:
    return Oracle(ending).generate(Request(IMAGE, images=[red()], max_tokens=48))


def test_ignoring_the_end_token_goes_on(found: Served) -> None:
    tokens, text = _output()
    output = found.outputs["past eos"]
    assert output.token_ids == list(tokens)
    assert output.text == text
    assert output.finish_reason == "length"


def test_a_stop_string_ends_text_and_tokens(found: Served) -> None:
    tokens, text = _output()
    output = found.outputs["stop"]
    assert output.text == text[: text.index(_stop())] != ""
    assert output.token_ids == list(tokens[: len(output.token_ids)])
    assert len(output.token_ids) < len(tokens)
    assert output.finish_reason == "stop"


def test_a_stop_string_in_the_first_token_leaves_no_text(found: Served) -> None:
    output = found.outputs["stop at once"]
    assert (output.text, output.finish_reason) == ("", "stop")
    assert len(output.token_ids) <= 4


def test_a_stop_id_is_the_last_token(found: Served) -> None:
    tokens, _ = _output()
    assert found.tokens("stop id") == list(tokens[: _new_at(5) + 1])
    assert found.outputs["stop id"].finish_reason == "stop"


@pytest.mark.parametrize(("name", "reason"), [("stop id at once", "stop"), ("one token", "length")])
def test_one_token_needs_no_decode(found: Served, name: str, reason: str) -> None:
    output = found.outputs[name]
    assert output.token_ids == [_output()[0][0]]
    assert output.finish_reason == reason
    assert found.transfers(name, "kv") == []
    assert not any(name in step.decodes for step in found.record.steps())


def test_one_token_of_text_is_that_of_generate(found: Served) -> None:
    answers("llava")
    assert found.tokens("text of one token") == answers("llava")["text"].token_ids[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "placement"), [("llava", "E+P+D"), ("qwen2_vl", "ED+P"), ("gemma3", "EPD"), ("mistral", "P+D")]
)
def test_tokens_and_logits_stay_right_to_the_end_of_the_context(architecture: str, placement: str) -> None:
    request = ask("long", TEXT, outputs=4000)
    found = serve(checkpoint(architecture), placement, [[request]])
    output = found.outputs["long"]
    assert output.clipped
    assert output.finish_reason == "length"
    assert len(output.token_ids) == output.max_tokens == 2048 - output.prompt_tokens
    answer = oracle(architecture).answer(ask("long", TEXT, outputs=output.max_tokens))
    assert problems(found, {"long": answer}) == {}


def _say_one_token(directory: Path) -> tuple[int, str]:
    """Make a copy of llama that says one special token and nothing else; its id and text."""
    shutil.copytree(checkpoint("llama"), directory)
    auto: Any = transformers.AutoTokenizer
    kept = auto.from_pretrained(directory).added_tokens_decoder
    said = max(number for number, each in kept.items() if each.special)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    named = directory / "generation_config.json"
    fields = {"eos_token_id": 3, "suppress_tokens": [each for each in range(size) if each != said]}
    named.write_text(json.dumps({**json.loads(named.read_text()), **fields}))
    return said, kept[said].content


def _generate_until(directory: Path, strings: list[str]) -> list[int]:
    auto: Any = transformers.AutoTokenizer
    tokenizer, make = auto.from_pretrained(directory), transformers.AutoModelForCausalLM
    model: Any = make.from_pretrained(directory, dtype=torch.float32)
    inputs = tokenizer("hello", return_tensors="pt")
    ended: dict[str, Any] = {"tokenizer": tokenizer, "stop_strings": strings, "max_new_tokens": 4, "pad_token_id": 0}
    found: list[int] = model.generate(**inputs, **ended, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    return found


async def test_a_stop_string_that_is_one_special_token_ends_as_in_generate(tmp_path: Path) -> None:
    """Special tokens are not in the text. The oracle is ``generate(stop_strings=..., tokenizer=...)``."""
    said, stop = await asyncio.to_thread(_say_one_token, tmp_path / "model")
    async with Pipeline(tmp_path / "model", "PD", dtype="float32") as pipe:
        for strings, reason in (([stop], "stop"), (["no", f" {stop}"], "length")):
            sampling = Sampling(stop=tuple(strings), temperature=0.0)
            output = await pipe.complete(Request("hello", sampling=sampling, max_tokens=4))
            assert output.token_ids == await asyncio.to_thread(_generate_until, tmp_path / "model", strings)
            assert output.finish_reason == reason
        past = Sampling(stop=(stop,), temperature=0.0, ignore_eos=True)
        assert (await pipe.complete(Request("hello", sampling=past, max_tokens=4))).token_ids == [said]
