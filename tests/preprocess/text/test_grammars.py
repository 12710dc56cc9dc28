"""Grammars at the door: what is refused, and says why; what a compiler would die or hang of ends its own request."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.checkpoint_files import checkpoint
from trinity.errors import RequestError
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text import grammars
from trinity.preprocess.text.grammar_check import STACK_BYTES, with_deep_stack
from trinity.preprocess.text.grammars import GrammarProblem, check_grammar, compiler_of, join_grammar, list_unwritten
from trinity.request import Request, Sampling, Structured, check_request

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def text_of(**fields: Any) -> str:
    return join_grammar(
        check_request(Request("a", sampling=Sampling(structured=Structured(**fields)))).sampling.structured
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": POINT},
        {"json_schema": json.dumps(POINT)},
        {"json_object": True},
        {"regex": r"(yes|no)"},
        {"grammar": 'start: "a"+ NAME\nNAME: /[a-z]{1,5}/'},
        {"json_schema": {"enum": [f"v{number}" for number in range(5000)]}},
        {"grammar": 'start: "<call>" %json {"type": "object"} "</call>"'},
    ],
)
def test_what_can_be_served(fields: dict[str, Any]) -> None:
    check_grammar(text_of(**fields), checkpoint("llama"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"json_schema": {"type": "array", "uniqueItems": True}}, r"JSON schema is refused: .*uniqueItems"),
    "type": ({"json_schema": {"type": "strin"}}, r"JSON schema is refused: .*strin"),
    "fetched": ({"json_schema": {"$ref": "http://127.0.0.1/x"}}, "JSON schema is refused: .*does not fetch"),
    "look-ahead": ({"regex": "a(?=b)b"}, "regex is refused: .*look-around"),
    "parenthesis": ({"regex": "("}, "regex is refused: .*unclosed group"),
    "lark": ({"grammar": "begin: A"}, "grammar is refused"),
    "nothing": ({"json_schema": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}}, "refused"),
    "deep": ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "refused: .*recursion limit"),
    "deep regex": ({"regex": "(" * 2000 + "a" + ")" * 2000}, "refused"),
    "deep grammar": ({"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000}, "refused"),
    "all of any": (
        {"json_schema": {"allOf": [{"anyOf": [{"minimum": 10 * i + j} for j in range(10)]} for i in range(6)]}},
        "refused: .*too large",
    ),
    "endless steps": ({"regex": "(a{1000}){1000}"}, "too complex|not compiled within"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "CPU_S", 1)
    monkeypatch.setattr(grammars, "TRIAL_PATIENCE_S", 400.0)  # it gives way to all others of a busy machine
    fields, why = REFUSED[name]
    with pytest.raises(GrammarProblem, match=f"(?s){why}"):
        check_grammar(text_of(**fields), checkpoint("llama"))


def chain(count: int, *, link: str, last: str) -> str:
    """Rules that refer to each other: a compiler's recursion is as deep."""
    rules = [link.format(this=f"a{n}", then=f"a{n + 1}") for n in range(count)]
    return "start: a0\n" + "\n".join(rules) + f"\na{count}: {last}"


HOSTILE: dict[str, dict[str, Any]] = {
    "references": {
        "json_schema": {
            "$defs": {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(1300)} | {"a1300": {}},
            "$ref": "#/$defs/a0",
        }
    },
    "rules": {"grammar": chain(1200, link="{this}: {then}", last='"x"')},
    "options": {"grammar": chain(350, link='{this}: (("y"|({then})+)? "z")*', last='"x"')},
    "conjunctions": {"grammar": "start: A\nA: " + " & ".join(f"/(.*a.{{{n}}}b.*)/" for n in range(1, 200))},
    "multiples": {
        "json_schema": {"properties": {f"k{n}": {"type": "integer", "multipleOf": 99991 - 2 * n} for n in range(800)}}
    },
    "doubled": {"grammar": chain(30, link="{this}: {then} {then}", last='"x"').replace("a", "A")},
    "dots": {"regex": "(.?){1000}" + "a?" * 3000},
    "alphabets": {"regex": r"(\p{L}+\p{N}*){1,100}" * 700},
    "bounds": {
        "json_schema": {
            "properties": {f"k{n}": {"type": "number", "minimum": -12.3 - n, "maximum": 98.7 + n} for n in range(700)}
        }
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_served_and_harms_nobody(name: str) -> None:
    """Several of these overflow the stack of a thread of the usual size, or compile for minutes."""
    with suppress(GrammarProblem):
        check_grammar(text_of(**HOSTILE[name]), checkpoint("llama"))


OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {},
    {"json_object": False},
    {"regex": "a", "json_object": True},
    {"regex": ""},
    {"regex": "a" * (1 << 14) + "a"},
    {"grammar": "\ud800"},
    {"json_schema": "no JSON"},
    {"json_schema": "[1]"},
    {"json_schema": {"enum": [float("nan")]}},
    {"json_schema": {"enum": [object()]}},
    {"json_schema": {"const": "a" * (1 << 16)}},
    {"json_schema": '{"items":' * 100_000},
    {"json_object": "yes"},
]


@pytest.mark.parametrize("fields", OUT_OF_BOUNDS)
def test_what_is_no_form_never_reaches_a_compiler(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"structured|json_schema|regex|grammar|json_object"):
        check_request(Request("a", sampling=Sampling(structured=Structured(**fields))))


@pytest.fixture
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llama"))
    yield made
    made.close()


async def refusal(processor: RequestProcessor, **sampling: Any) -> str:
    with pytest.raises(RequestError) as caught:
        await processor.aprocess(check_request(Request("a", sampling=Sampling(**sampling), request_id="mine")))
    assert caught.value.request_id == "mine"
    return str(caught.value)


async def test_the_door_names_what_is_wrong(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    form = Structured(json_schema=POINT)
    assert "unknown logits processor 'nobodys'" in await refusal(processor, logits_processor="nobodys")
    assert "ignore_eos" in await refusal(processor, structured=form, ignore_eos=True)
    assert "uniqueItems" in await refusal(processor, structured=Structured(json_schema={"uniqueItems": True}))
    found = await processor.aprocess(check_request(Request("a", sampling=Sampling(structured=form))))
    assert found.work.sampling.structured == "json_schema:" + json.dumps(POINT)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    assert "pip install 'trinity-epd[structured]'" in await refusal(processor, structured=form)


async def test_a_slow_grammar_delays_no_other_request(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "CPU_S", 1)
    monkeypatch.setattr(grammars, "TRIAL_PATIENCE_S", 400.0)  # it gives way to all others of a busy machine
    slow = asyncio.ensure_future(refusal(processor, structured=Structured(regex="(b{1000}){1000}")))
    await asyncio.sleep(0.05)
    for _ in range(3):
        await processor.aprocess(Request("a"))
    assert not slow.done(), "it was refused before the others came: nothing was tried"
    assert re.search("too complex|not compiled within", await slow)  # a busy machine gives it less of its time


def test_a_grammar_is_compiled_once_and_few_are_kept() -> None:
    compiler = compiler_of(checkpoint("llama"))
    assert compiler_of(checkpoint("llama")) is compiler
    first = compiler.compile("regex:a")
    assert compiler.compile("regex:a") is first
    for number in range(grammars._MOST_GRAMMARS):
        compiler.compile(f"regex:a{{{number + 1}}}").result()
    assert compiler.compile("regex:a") is not first


def test_threads_that_start_at_once_leave_the_size_of_a_stack_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of two compilers has a stack of the usual size, which a grammar may overflow, or all others a huge."""
    sizes, set_size, usual = list[int](), threading.stack_size, threading.Thread

    class Slow(usual):  # type: ignore[misc, valid-type]
        def start(self) -> None:
            if self.name == "deep":
                time.sleep(0.002)
                sizes.append(set_size(0))
                set_size(sizes[-1])
            super().start()

    monkeypatch.setattr(threading, "Thread", Slow)
    with ThreadPoolExecutor(4) as pool:
        for started in [pool.submit(with_deep_stack, lambda: None, "deep") for _ in range(12)]:
            started.result().join()
    assert sizes == [STACK_BYTES] * 12
    assert set_size(0) == 0


def test_a_form_that_only_banned_tokens_can_begin_is_refused() -> None:
    processor = RequestProcessor(checkpoint("llama"))
    yes, no = ((processor.loaded.tokenizer.convert_tokens_to_ids(letter),) for letter in "YN")

    async def ask(**banned: Any) -> None:
        await processor.aprocess(Request("a", sampling=Sampling(structured=Structured(regex="Y+|N+"), **banned)))

    async def ask_all() -> None:
        for banned in ("suppress_tokens", "begin_suppress_tokens"):
            with pytest.raises(RequestError, match="no token that can begin such an output may be drawn"):
                await ask(**{banned: (*yes, *no)})
        with pytest.raises(RequestError, match="no token that can begin such an output may be drawn"):
            await ask(bad_words_ids=(yes, no))
        await ask(suppress_tokens=yes)
        await ask(bad_words_ids=((*yes, *no), yes))

    try:
        asyncio.run(ask_all())
    finally:
        processor.close()


def test_bans_of_the_generation_config_count_at_the_door(tmp_path: Path) -> None:
    """Where the request says nothing; an empty value in it leaves them out."""
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "banning"))
    load: Any = AutoTokenizer.from_pretrained(directory)  # type: ignore[no-untyped-call]
    yes, no = (load.convert_tokens_to_ids(letter) for letter in "YN")
    form = Structured(regex="Y+|N+")

    async def ask(processor: RequestProcessor) -> None:
        with pytest.raises(RequestError, match="generation config may set"):
            await processor.aprocess(Request("a", sampling=Sampling(structured=form)))
        await processor.aprocess(Request("a", sampling=Sampling.greedy(structured=form)))
        await processor.aprocess(Request("a", sampling=Sampling(structured=Structured(regex="Y+|N+|M"))))

    for banned in (
        {"suppress_tokens": [yes, no]},
        {"begin_suppress_tokens": [yes, no]},
        {"bad_words_ids": [[yes], [no]]},
        {"suppress_tokens": [yes], "bad_words_ids": [[no]]},
    ):
        (directory / "generation_config.json").write_text(json.dumps(banned))
        processor = RequestProcessor(directory)
        try:
            asyncio.run(ask(processor))
        finally:
            processor.close()


def test_tokens_that_a_model_never_writes_are_those_of_its_images_codes() -> None:
    config = SimpleNamespace(vocabulary_map={"IMGIMGAZ": 7, "IMGIMGBCZ": 9, "<image>": 3, "a": 1})
    assert list_unwritten(config) == {7, 9}
    assert list_unwritten(SimpleNamespace()) == frozenset()
