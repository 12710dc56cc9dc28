"""Structured outputs through whole pipelines: each validates, and none depends on the placement, a preemption or a
process. jsonschema judges the texts, transformers' own logits the tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.recordings import copy_of, oracle, serve
from support.request_cases import BUDGET, TEXT, red
from trinity.core.logits_processors import register_logits_processor
from trinity.core.scheduler import BatchRules
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.request import Output, Request, Sampling, Structured

pytestmark = pytest.mark.xdist_group("llava")

THING = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "grey blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 120},
        "where": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
        "sure": {"type": "boolean"},
    },
    "required": ["colour", "count", "sure"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "leaf": {"anyOf": [{"type": "null"}, {"type": "number", "minimum": -1, "maximum": 1}, {"const": "end"}]},
        "pair": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
    "type": "array",
    "items": {"$ref": "#/$defs/pair"},
    "minItems": 1,
    "maxItems": 2,
}
DATE = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
DATE["additionalProperties"] = False  # type: ignore[assignment]
VOCABULARY = 356  # tokens of the model
SCHEMAS: list[dict[str, Any]] = [THING, TREE, DATE]
TIGHT: dict[str, Any] = {"pools": {"image": 9, "kv": 64}, "image_block_size": 7, "kv_block_size": 4}
SMALL_STEPS = BatchRules(token_budget=BUDGET)


def ask(name: str, number: int, **sampling: Any) -> Request:
    """Every second request is drawn by its seed, and every third looks at a picture."""
    compact = {**SCHEMAS[number % len(SCHEMAS)], "x-guidance": {"whitespace_pattern": " ?"}}
    if number % 2:
        sampling = {"temperature": 0.9, "seed": number, "top_p": 0.95, **sampling}
    form = Sampling(structured=Structured(json_schema=compact), **{"temperature": 0.0, **sampling})
    images = [red()] if number % 3 == 0 else []
    return Request(
        f"{'<image>' * len(images)}{TEXT} {number}", images=images, max_tokens=150, sampling=form, request_id=name
    )


def judge(outputs: Sequence[tuple[int, Output]]) -> None:
    for number, output in outputs:
        assert output.finish_reason == "stop", output.text
        jsonschema.validate(json.loads(output.text), SCHEMAS[number % len(SCHEMAS)], jsonschema.Draft202012Validator)


def run(placement: str, numbers: Sequence[int], **options: Any) -> dict[str, Output]:
    found = serve(checkpoint("llava"), placement, [[ask(str(number), number) for number in numbers]], **options)
    judge([(int(name), output) for name, output in found.outputs.items()])
    return found.outputs


def texts(outputs: dict[str, Output]) -> dict[str, tuple[list[int], str]]:
    return {name: (output.token_ids, output.text) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def wanted() -> dict[str, tuple[list[int], str]]:
    return texts(run("EPD", range(12)))


def test_outputs_validate_and_are_the_same_wherever_they_are_made(wanted: dict[str, tuple[list[int], str]]) -> None:
    assert len({text for _, text in wanted.values()}) > 6
    assert texts(run("E+P+D", range(12), rules=SMALL_STEPS)) == wanted


def test_what_is_preempted_goes_on_in_its_grammar(wanted: dict[str, tuple[list[int], str]]) -> None:
    for placement in ("EPD", "E+P+D"):
        found = run(placement, range(12), rules=SMALL_STEPS, reservation="optimistic", **TIGHT)
        assert texts(found) == wanted
        assert sum(output.preemptions for output in found.values()), f"{placement}: the pool was large enough for all"


def test_greedy_tokens_are_the_models_likeliest_that_the_schema_allows(
    wanted: dict[str, tuple[list[int], str]],
) -> None:
    """transformers' logits along the output, and a matcher and masks of llguidance that this test drives."""
    for number in (0, 2, 4):
        request, tokens = ask(str(number), number), wanted[str(number)][0]
        assert request.sampling.structured is not None
        schema: Any = request.sampling.structured.json_schema
        logits = oracle("llava").logits_along(request, tokens).numpy().copy()
        load: Any = AutoTokenizer.from_pretrained
        followed = from_tokenizer(load(checkpoint("llava")))
        matcher = LLMatcher(followed, LLMatcher.grammar_from_json_schema(schema))
        for token, row in zip(tokens, logits, strict=True):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            row[len(allowed) :] = -np.inf
            row[: len(allowed)][allowed[: len(row)] == 0] = -np.inf
            assert token == row.argmax()
            matcher.consume_token(token)
        assert matcher.is_accepting()
        assert tokens[-1] == followed.eos_token


@pytest.mark.slow
def test_a_thousand_outputs_validate_in_one_place_and_in_three() -> None:
    thousand = range(1000)
    one = run("EPD", thousand, pools={"image": 64, "kv": 4096})
    three = run("E+P+D", thousand, pools={"image": 64, "kv": 4096})
    assert len(one) == 1000
    assert texts(one) == texts(three)


async def test_ends_limits_stop_strings_and_other_rules_hold() -> None:
    register_logits_processor("no capitals", no_capitals)
    async with Pipeline(checkpoint("llava"), "E+P+D", dtype="float32") as pipe:

        async def output(form: Structured, most: int = 200, **sampling: Any) -> Output:
            chosen = Sampling(**{"temperature": 0.0, **sampling}, structured=form)
            return await pipe.complete(Request("Say", max_tokens=most, sampling=chosen))

        word, many = Structured(regex="[a-zA-Z]{3,40}"), Structured(regex="[a-z]{60,80}")
        cut, named, drawn, other, lower = await asyncio.gather(
            output(many, 5),
            output(Structured(grammar='start: "<" WORD ">" WORD "</end>"\nWORD: /[a-z]{2,4}/'), stop="</end>"),
            output(word, temperature=1.2, seed=3, presence_penalty=1.0, min_tokens=10, logprobs=2),
            output(word, temperature=1.2, seed=4, presence_penalty=1.0, min_tokens=10),
            output(word, temperature=1.2, seed=3, logits_processor="no capitals"),
        )
        with pytest.raises(RequestError, match="no token that can begin"):
            await output(Structured(regex="a"), suppress_tokens=range(350))
        first = await asyncio.to_thread(letter, "a")
        banned = [each for each in range(350) if each != first]  # nothing is left of it behind its first token
        with pytest.raises(
            RequestError, match=r"token 1 of the output: suppress_tokens .* that the regex allows"
        ) as no:
            await output(Structured(regex="a!"), suppress_tokens=banned)
        assert type(no.value) is RequestError
        plain = Sampling(temperature=0.0, begin_suppress_tokens=tuple(range(VOCABULARY)))
        with pytest.raises(RequestError, match=r"token 0 of the output: begin_suppress_tokens.* ban all tokens"):
            await pipe.complete(Request("Say", sampling=plain))
        with pytest.raises(RequestError, match="uniqueItems"):
            await output(Structured(json_schema={"uniqueItems": True}))
        await pipe.wait_idle()
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    assert named.finish_reason == "stop"
    assert re.fullmatch(r"<[a-z]{2,4}>[a-z]{2,4}", named.text)
    assert re.fullmatch("[a-zA-Z]{3,40}", drawn.text)
    assert drawn.text != other.text
    assert len(drawn.token_ids) > 10
    assert len(drawn.top_logprobs) == len(drawn.token_ids)
    assert re.fullmatch("[a-z]{3,40}", lower.text)


async def test_bans_of_the_generation_config_refuse_their_own_request_amid_a_grammar(tmp_path: Path) -> None:
    """In processes too; what was asked for beside it comes as it does alone."""
    first, directory = await asyncio.to_thread(letter, "a"), tmp_path / "banning"
    await asyncio.to_thread(shutil.copytree, checkpoint("llava"), directory)
    banned = {"suppress_tokens": [each for each in range(VOCABULARY) if each != first]}
    await asyncio.to_thread((directory / "generation_config.json").write_text, json.dumps(banned))
    form = Structured(regex="a{1,3}!")
    for hosting in ("thread", "process"):
        async with Pipeline(directory, "EP+D", dtype="float32", hosting=hosting) as pipe:

            async def output(**sampling: Any) -> Output:
                return await pipe.complete(Request("Say", max_tokens=8, sampling=Sampling.greedy(**sampling)))

            alone = await output(structured=form)
            refused, beside = await asyncio.gather(
                pipe.complete(Request("Say", max_tokens=8, sampling=Sampling(structured=form))),
                output(structured=form),
                return_exceptions=True,
            )
            await pipe.wait_idle()
        assert type(refused) is RequestError
        assert re.search(r"token 3 of the output: suppress_tokens .*generation config.* the regex allows", str(refused))
        assert isinstance(beside, Output)
        assert (beside.text, beside.finish_reason) == (alone.text, "stop")
        assert re.fullmatch("a{1,3}!", alone.text)


@pytest.mark.parametrize("name", ["suppress_tokens", "begin_suppress_tokens", "bad_words_ids"])
async def test_a_ban_of_one_spelling_leaves_others_to_a_form(name: str) -> None:
    """A form that leaves one text has the tokenizer's own spelling in its mask alone, at its beginning and amid it."""
    pair, whole = await asyncio.to_thread(letter, "th"), Structured(regex="the(the){0,1}!")
    banned = ((pair,),) if name == "bad_words_ids" else (pair,)
    async with Pipeline(checkpoint("llava"), "EPD", dtype="float32") as pipe:
        usual, other = [
            await pipe.complete(Request("Say", max_tokens=12, sampling=Sampling.greedy(structured=whole, **bans)))
            for bans in ({}, {name: banned})
        ]
        await pipe.wait_idle()
    assert re.fullmatch("the(the)?!", usual.text)
    assert usual.token_ids[0] == pair
    assert re.fullmatch("the(the)?!", other.text)
    assert other.token_ids[0] == await asyncio.to_thread(letter, "t")
    if name != "begin_suppress_tokens":
        assert pair not in other.token_ids


@cache
def vocabulary() -> dict[str, int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint("llava"))  # type: ignore[no-untyped-call]
    return dict(tokenizer.get_vocab())


def letter(text: str) -> int:
    return vocabulary()[text]


def capitals() -> list[int]:
    return [number for token, number in vocabulary().items() if token != token.lower()]


def no_capitals(prompt: Any, outputs: Any, logits: Any) -> Any:
    logits[capitals()] = float("-inf")
    return logits


# ---------------------------------------------------------------- in processes, with a package's processor

MODULE = """
def shout(prompt, outputs, logits):
    logits[60 + len(prompt) % 7 + len(outputs)] += 1e4
    return logits

def fails(prompt, outputs, logits):
    raise ValueError("no idea")
"""
ENTRIES = "[trinity.logits_processors]\nshout = hooks_of_yours:shout\nfails = hooks_of_yours:fails\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "hooks_of_yours.py").write_text(MODULE)
    about = folder / "hooks_of_yours-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hooks_of_yours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{paths.ROOT}:{paths.PYTHON_PATH}")
        with kept_launcher():
            yield
    sys.modules.pop("hooks_of_yours", None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("placement", ["EPD", pytest.param("E+P+D", marks=pytest.mark.slow)])
async def test_instances_in_processes_do_the_same(placement: str, wanted: dict[str, tuple[list[int], str]]) -> None:
    register_logits_processor("of this process", no_capitals)
    shouted = Request("Say", max_tokens=5, sampling=Sampling.greedy(logits_processor="shout", ignore_eos=True))
    options = pipeline_options({"dtype": "float32", "pools": {"image": 32, "kv": 512}})
    async with Pipeline(checkpoint("llava"), placement, hosting="process", **options) as pipe:
        asked = [ask(str(number), number) for number in range(12)]
        *found, loud = await asyncio.gather(*map(pipe.complete, [*asked, shouted]))
        for name in ("fails", "of this process"):
            with pytest.raises(RequestError, match="no idea" if name == "fails" else "instances in processes"):
                await pipe.complete(Request("Say", max_tokens=5, sampling=Sampling(logits_processor=name)))
        again = await pipe.complete(copy_of(asked[0], 2))
    assert texts({output.request_id: output for output in found}) == wanted
    assert again.token_ids == wanted["0"][0]
    first = loud.token_ids[0]
    assert loud.token_ids == [first + count for count in range(5)]


CONTROL_TEXTS = [
    Structured(grammar='start: "<image>"'),
    Structured(grammar='start: "a<image>b"'),
    Structured(regex="<image>!"),
    Structured(grammar='start: "</s>"'),
    Structured(json_schema={"const": "<|assistant|>"}),
]
"""Forms that leave one text, which the tokenizer reads as a control token."""


async def test_a_form_may_leave_nothing_but_the_text_of_a_control_token() -> None:
    """The form's text is spelled by other tokens: a control token is not the text by which it is written."""
    async with Pipeline(checkpoint("llava"), "EPD", dtype="float32") as pipe:
        asked = (Request("Say", max_tokens=30, sampling=Sampling.greedy(structured=each)) for each in CONTROL_TEXTS)
        made = await asyncio.gather(*map(pipe.complete, asked))
        await pipe.wait_idle()
    assert [each.finish_reason for each in made] == ["stop"] * len(made)
    assert [each.text for each in made] == ["<image>", "a<image>b", "<image>!", "</s>", '"<|assistant|>"']


async def test_bans_of_all_that_a_control_token_s_text_begins_with_are_refused_at_the_door() -> None:
    first = await asyncio.to_thread(letter, "<")
    form = Sampling.greedy(structured=Structured(grammar='start: "<image>"'), suppress_tokens=(first,))
    async with Pipeline(checkpoint("llava"), "EPD", dtype="float32") as pipe:
        with pytest.raises(RequestError, match="no token that can begin such an output may be drawn"):
            await pipe.complete(Request("Say", max_tokens=30, sampling=form))
