"""Trials of grammars side by side: a hostile one ends its own request, late, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import ClosedError, Overloaded, RequestError
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text import grammar_trials, grammars
from trinity.request import Request, Sampling, Structured


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestProcessor]:
    monkeypatch.setattr(grammars, "QUICK_S", 0.4)
    monkeypatch.setattr(grammars, "CPU_S", 0.8)
    monkeypatch.setattr(grammars, "TRIAL_PATIENCE_S", 300.0)  # a busy machine may take long for 0.8 s of CPU
    made = RequestProcessor(checkpoint("llama"))
    yield made
    made.close()


async def ask(processor: RequestProcessor, regex: str) -> str:
    """Return the text of a refusal, "" for none."""
    try:
        await processor.aprocess(Request("a", sampling=Sampling(structured=Structured(regex=regex)), request_id=regex))
    except RequestError as error:
        return str(error) if error.request_id == regex else f"of another request: {error}"
    return ""


def hostile(letter: str) -> str:
    """A regex of a few characters that would take minutes."""
    return f"({letter}{{1000}}){{1000}}"


async def test_a_harmless_grammar_overtakes_hostile_ones(processor: RequestProcessor) -> None:
    before = [asyncio.create_task(ask(processor, hostile(letter))) for letter in "cd"]
    await asyncio.sleep(0)
    assert await ask(processor, "(yes|no)") == ""
    assert not before[1].done(), "it waited until all that came before it had been tried"
    assert all("too complex" in text for text in await asyncio.gather(*before))


async def test_more_than_may_wait_are_refused_and_a_text_is_tried_once(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trials, "MOST_TRIALS", 2)
    asked = [asyncio.create_task(ask(processor, f"x{{{number // 20 + 3}}}")) for number in range(60)]
    found = await asyncio.gather(*asked)
    assert found[:40] == [""] * 40
    assert all("are being tried; send the request again later" in text for text in found[40:])
    before = grammars.try_grammar.cache_info()
    assert [await ask(processor, "x{3}"), await ask(processor, "x{5}")] == ["", ""]
    assert grammars.try_grammar.cache_info().misses == before.misses + 1


async def test_slow_ones_beyond_a_few_are_refused_after_the_short_time(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:  # undone alone: the fixture's times stay
        full.setattr(grammar_trials, "MOST_SLOW", 0)
        with pytest.raises(Overloaded, match="take long to compile"):
            await processor.aprocess(Request("a", sampling=Sampling(structured=Structured(regex=hostile("e")))))
    assert "too complex" in await ask(processor, hostile("c")), "a refusal for want of room was kept as an answer"


async def test_a_busy_host_is_not_the_fault_of_a_grammar(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(structured=Structured(regex="(up|down)"))
    asked = [Request("a", sampling=sampling, request_id=name) for name in "ab"]
    with monkeypatch.context() as busy:
        busy.setattr(grammars, "TRIAL_PATIENCE_S", 1e-3)  # less than a process takes to start
        found = await asyncio.gather(*map(processor.aprocess, asked), return_exceptions=True)
    assert [type(each) for each in found] == [Overloaded] * 2
    assert [each.request_id for each in found if isinstance(each, Overloaded)] == ["a", "b"]
    assert all("this host had not" in str(each) and "send the request again later" in str(each) for each in found)
    assert await ask(processor, "(up|down)") == "", "a refusal for want of time was kept as an answer"


async def test_requests_that_leave_make_room(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "MOST_TRIALS", 1)
    leaving = [asyncio.create_task(ask(processor, hostile("f"))) for _ in range(2)]
    await asyncio.sleep(0.05)
    leaving[0].cancel()
    await asyncio.sleep(0)
    assert "are being tried" in await ask(processor, "(left|right)"), "the other one still waits for it"
    leaving[1].cancel()
    await asyncio.wait(leaving)
    assert all(task.cancelled() for task in leaving)
    assert await ask(processor, "(left|right)") == ""


async def test_trials_that_wait_are_refused_by_a_close(processor: RequestProcessor) -> None:
    waiting = [asyncio.create_task(ask(processor, hostile(letter))) for letter in "ghijk"]
    await asyncio.sleep(0.05)
    await processor.aclose()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, ClosedError) or "complex" in str(each) for each in ended)
    assert any(isinstance(each, ClosedError) for each in ended)


async def test_a_flood_of_one_client_leaves_others_their_turn(processor: RequestProcessor) -> None:
    """At 9df71424 all waited in one queue: 8 to 23 s next to sixteen slow ones."""
    texts = [f"({letter}{{1000}}){{1000}}" for letter in "klmnopqrstuvwxyz"]
    flood = [asyncio.create_task(processor.sampling_door._trials.find_problem(f"regex:{t}", t, "a")) for t in texts]
    await asyncio.sleep(0)
    assert await processor.sampling_door._trials.find_problem("regex:(on|off)", "other", "b") == ""
    done = sum(each.done() for each in flood)
    assert done < len(flood) // 2, "it waited for most of the others"
    await asyncio.gather(*flood, return_exceptions=True)


async def test_one_client_may_not_take_all_room(processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "MOST_OF_CLIENT", 2)
    find = processor.sampling_door._trials.find_problem
    flood = [asyncio.create_task(find(f"regex:{hostile(letter)}", letter, "a")) for letter in "lmn"]
    await asyncio.sleep(0)
    assert await find("regex:(in|out)", "other", "b") == ""
    found = await asyncio.gather(*flood, return_exceptions=True)
    assert [isinstance(each, Overloaded) and "of yours" in str(each) for each in found] == [False, False, True]


@pytest.mark.parametrize(
    "schema",
    ['{"$ref": "#"}', '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'],
)
def test_a_schema_that_refers_to_itself_is_refused_in_words(schema: str) -> None:
    """At 9df71424: "NoExtensionBias <non-verbose/>"."""
    answer = grammars.try_grammar(f"json_schema:{schema}", 2.0)
    assert "refers to itself and never ends" in answer.problem
    assert "NoExtensionBias" not in answer.problem


def test_a_refusal_repeats_little_of_a_grammar() -> None:
    for text in (
        "regex:" + "a" * 3000 + "(",
        "grammar:start: foo\n" + "x" * 3000,
        'json_schema:{"type": "%s"}' % ("x" * 3000),
    ):
        answer = grammars.try_grammar(text, 2.0)
        assert 0 < len(answer.problem) <= 200
