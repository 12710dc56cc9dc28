"""Steps begun before the tokens of the one before are known: no token may change. Run on the CPU as on a GPU."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.language_stage import PROMPT, Solo, work
from support.operator_tape import StaticTorch, every_operator_is_torchs, graphs
from support.stage_driver import OUTPUTS, TEXTS, generated, pictures
from trinity import Instance, Pipeline, Request
from trinity.core.messages import IMAGE, KV, Prefill, Step, Work
from trinity.errors import RequestError, StageError
from trinity.request import Output, Sampling
from trinity.stages import language
from trinity.stages.async_steps import DeviceTokens, FinishedStep, LaunchedStep
from trinity.stages.base import LaunchableStage, PendingStep, StageSetup
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.language import LanguageStage

pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02},
]
LOOKING_BACK: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "temperature": 1.0, "seed": 6},
    {"bad_words_ids": tuple((token, other) for token in range(0, 250, 5) for other in range(0, 250, 7)), "logprobs": 1},
    {"min_tokens": 5, "suppress_tokens": tuple(range(0, 250, 3))},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "temperature": 0.9, "seed": 7},
    {"frequency_penalty": -0.5, "logit_bias": tuple((token, 2.0) for token in range(0, 250, 4)), "logprobs": 2},
]


def asked(*further: dict[str, Any]) -> list[Work]:
    ways = [*WAYS, *further]
    return [work(f"r{n}", PROMPT[: 6 + 9 * n], **way) for n, way in enumerate(ways)]


def silent(name: str = "llama", **how: Any) -> Solo:
    """A stage that nobody observes: an observer must see logits at once, and has every step run so."""
    solo = Solo(name, **how)
    solo.stage.observe = None
    return solo


def chunk(each: Work) -> Prefill:
    return Prefill(each.request, 0, len(each.prompt), True)


def launched(solo: Solo, works: list[Work], depth: int, steps: int = 10) -> dict[str, list[int]]:
    """Prefill all at once, then decode all, ``depth`` steps in flight."""
    tokens: dict[str, list[int]] = {each.request: [] for each in works}
    flight: deque[PendingStep] = deque()

    def read() -> None:
        for name, one in flight.popleft().wait().items():
            tokens[name].append(one.token)

    for each in works:
        solo.open(each)
    flight.append(solo.stage.launch_on_device(Step(0, "joint", prefills=tuple(map(chunk, works)))))
    for number in range(steps):
        while len(flight) >= depth:
            read()
        names = tuple(each.request for each in works)
        flight.append(solo.stage.launch_on_device(Step(1 + number, "joint", decodes=names)))
    while flight:
        read()
    return tokens


def alone(works: list[Work], steps: int = 10) -> dict[str, list[int]]:
    return {each.request: Solo().serve(each, steps + 1) for each in works}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_that_stay_on_the_device_are_fed_from_there(depth: int) -> None:
    solo, works = silent(), asked()
    assert launched(solo, works, depth) == alone(works)
    table = solo.stage._requests
    assert (table.steps_in_flight, table.in_flight.max(), table.suspects) == (0, 0, set())


@pytest.mark.parametrize("further", [[], LOOKING_BACK[:1], LOOKING_BACK], ids=["plain", "penalty", "bans"])
def test_recorded_decodes_read_them_there_too(further: list[dict[str, Any]]) -> None:
    solo, works = silent(backend=StaticTorch()), asked(*further)
    made, recorder = graphs()
    kv = solo.pool.memory.tensor
    solo.stage._graphs = DecodeGraphs(solo.model, kv, StaticTorch(), made, solo.stage._tokens)
    assert launched(solo, works, 2) == alone(works)
    assert recorder.replays >= 10


def test_rows_that_the_host_rules_run_at_once_behind_what_was_launched() -> None:
    solo, works = (
        silent(),
        asked({"structured": "regex:[a-z ]+"}, {"structured": "regex:[a-z]+", "temperature": 1.0, "seed": 8}),
    )
    assert launched(solo, works, 2) == alone(works)
    solo, ahead = silent(), asked({"structured": "regex:[a-z ]+"})
    for each in ahead:
        solo.open(each)
    first = solo.stage.launch_on_device(Step(0, "joint", prefills=tuple(map(chunk, ahead[:-1]))))
    second = solo.stage.launch_on_device(Step(1, "joint", prefills=(chunk(ahead[-1]),), decodes=(ahead[0].request,)))
    assert isinstance(first, LaunchedStep)
    assert isinstance(second, FinishedStep)
    tokens = second.wait()
    second.drop()
    assert (
        solo.stage.launch_on_device(Step(1, "joint", prefills=(chunk(ahead[-1]),), decodes=(ahead[0].request,))).wait()
        == tokens
    )


def test_the_host_knows_none_of_them_meanwhile() -> None:
    solo, (each, *_) = silent(), asked()
    solo.open(each)
    first = solo.stage.launch_on_device(Step(0, "joint", prefills=(chunk(each),)))
    second = solo.stage.launch_on_device(Step(1, "joint", decodes=(each.request,)))
    row = solo.stage._requests.find(each.request)
    table = solo.stage._requests
    assert (int(table.length[row.slot]), int(table.token[row.slot])) == (len(each.prompt) + 1, -1)
    assert isinstance(first, LaunchedStep)
    assert first.ready()
    tokens = [pending.wait()[each.request].token for pending in (first, second)]
    assert tokens == Solo().serve(each, 2)
    assert int(solo.stage._requests.token[row.slot]) == tokens[1]


def test_dropped_steps_leave_nothing() -> None:
    solo, works = silent(), asked()[:2]
    tokens = launched(solo, works, 2, steps=3)
    names = tuple(each.request for each in works)
    pending = [solo.stage.launch_on_device(Step(9, "joint", decodes=names)) for _ in range(2)]
    for each in reversed(pending):
        each.drop()
    for _ in range(3):
        for name, one in solo.step(decodes=names).items():
            tokens[name].append(one.token)
    assert tokens == alone(works, 6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_that_look_back_are_launched_too(depth: int) -> None:
    """What they look at stays on the device: prompts, and the tokens that nobody has read."""
    works = asked(*LOOKING_BACK)
    solo = silent()
    assert launched(solo, works, depth) == alone(works)
    names = tuple(each.request for each in works)
    pending = [solo.stage.launch_on_device(Step(20 + at, "joint", decodes=names)) for at in range(2)]
    assert [type(each) for each in pending] == [LaunchedStep] * 2
    found = [{name: one.token for name, one in each.wait().items()} for each in pending]
    assert found == [{name: tokens[at] for name, tokens in alone(works, 12).items()} for at in (11, 12)]


def test_their_texts_follow_steps_that_ran_at_once_and_slots_that_changed_hands() -> None:
    """What a step says at once, a device hears of at the next launch; a text of another request is not looked at."""
    solo, works = silent(), asked(*LOOKING_BACK)[-3:]
    tokens = launched(solo, works, 2, steps=3)
    names = tuple(each.request for each in works)
    pending = solo.stage.launch_on_device(Step(9, "joint", decodes=names))
    pending.drop()
    for step in range(4):
        found = solo.step(decodes=names) if step % 2 else solo.stage.launch_on_device(Step(9, "joint", decodes=names))
        for name, one in (found if isinstance(found, dict) else found.wait()).items():
            tokens[name].append(one.token)
    assert tokens == alone(works, 7)
    for name in names:
        solo.stage.close(name)
    other = [work(f"n{n}", PROMPT[n:], **way) for n, way in enumerate(LOOKING_BACK)]
    assert launched(solo, other, 2) == alone(other)


def test_logprobs_come_with_the_tokens() -> None:
    solo, each = silent(), work("r", PROMPT, logprobs=3, repetition_penalty=1.2)
    solo.open(each)
    pending = solo.stage.launch_on_device(Step(0, "joint", prefills=(chunk(each),)))
    found = [pending.wait()["r"], solo.stage.launch_on_device(Step(1, "joint", decodes=("r",))).wait()["r"]]
    other = Solo()
    other.open(each)
    wanted = [other.step(chunk(each))["r"], other.step(decodes=("r",))["r"]]
    assert [(one.token, [token for token, _ in one.top or ()]) for one in found] == [
        (one.token, [token for token, _ in one.top or ()]) for one in wanted
    ]
    for one, same in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(same.logprob, abs=1e-5)
        assert [value for _, value in one.top or ()] == pytest.approx([value for _, value in same.top or ()], abs=1e-5)


def test_requests_beyond_the_slots_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device keeps tokens of so many: launches before are settled first, and read later all the same."""
    works, solo = asked(), silent()
    assert launched(solo, works, 3) == alone(works)
    monkeypatch.setattr(language, "MOST_SLOTS", 2)
    names = tuple(each.request for each in works)
    first = solo.stage.launch_on_device(Step(20, "joint", decodes=names[:2]))
    second = solo.stage.launch_on_device(Step(21, "joint", decodes=names))
    assert (type(first), type(second)) == (LaunchedStep, FinishedStep)
    assert second.ready()
    again = {name: [one.token] for name, one in first.wait().items()}
    for name, one in second.wait().items():
        again.setdefault(name, []).append(one.token)
    wanted = alone(works, 12)
    assert again == {name: tokens[11:13] if name in names[:2] else tokens[11:12] for name, tokens in wanted.items()}


def test_logits_without_a_largest_are_told_when_they_are_read() -> None:
    solo, works = silent(), asked()[:2]
    launched(solo, works, 1, steps=1)
    names = tuple(each.request for each in works)
    row = solo.stage._requests.find("r0")
    held, kept = int(solo.stage._requests.length[row.slot]), solo.pool.memory.tensor[row.table[0]].clone()
    solo.pool.memory.tensor[row.table[0]] = torch.nan
    first = solo.stage.launch_on_device(Step(1, "joint", decodes=names))
    second = solo.stage.launch_on_device(Step(2, "joint", decodes=names))
    with pytest.raises(StageError, match="row 0 of the logits holds NaN"):
        first.wait()
    third = Step(3, "joint", prefills=(Prefill("r9", 0, 3, True),))
    solo.open(work("r9", PROMPT[:3]))
    solo.stage.observe = solo._observe
    with pytest.raises(StageError, match="an earlier step has failed"):
        solo.stage.launch_on_device(third)
    second.drop()
    first.drop()
    assert (int(solo.stage._requests.length[row.slot]), solo.stage._requests.steps_in_flight) == (held, 0)
    solo.pool.memory.tensor[row.table[0]] = kept
    solo.stage.close("r9")
    found = solo.step(decodes=names)
    assert [found[name].token for name in names] == [tokens[2] for tokens in alone(works, 2).values()]


def test_a_token_that_is_none_is_never_looked_up() -> None:
    tokens = DeviceTokens(torch.device("cpu"))
    slots = torch.tensor([4, 2])
    tokens.store(slots, torch.tensor([-1, 9]))
    assert tokens.fill_unknown(torch.tensor([-1, -1]), slots).tolist() == [0, 9]
    assert tokens.fill_unknown(torch.tensor([5, -1]), slots).tolist() == [5, 9]


class OnDevice(LanguageStage):
    """As on a GPU."""

    launch = LanguageStage.launch_on_device


def test_it_is_offered_on_a_gpu_alone() -> None:
    solo = Solo()
    assert not isinstance(solo.stage, LaunchableStage)
    assert isinstance(OnDevice(solo.model, solo.pool.memory, None), LaunchableStage)


def on_device(setup: StageSetup) -> LanguageStage:
    letters = setup.roles.replace("E", "")
    return OnDevice(setup.model, setup.memory[KV], setup.memory.get(IMAGE), letters)


@pytest.mark.parametrize("roles", [("EPD",), ("EP", "D")], ids="+".join)
async def test_a_pipeline_two_steps_deep(roles: tuple[str, ...]) -> None:
    pools = {"image": 64, "kv": 256}
    placement = [Instance(each, f"i{n}", pools=pools, stages=[on_device], depth=2) for n, each in enumerate(roles)]
    wanted = {count: await asyncio.to_thread(generated, "llava", count) for count in (0, 1, 3)}
    async with Pipeline(checkpoint("llava"), placement, dtype="float32") as pipe:
        requests = [
            Request(TEXTS[n], images=pictures(n), max_tokens=OUTPUTS, sampling=Sampling(ignore_eos=True))
            for n in wanted
        ]
        outputs = await asyncio.gather(*map(pipe.complete, requests))
    assert [output.token_ids for output in outputs] == [each.ids for each in wanted.values()]


@pytest.mark.parametrize("roles", [("EPD",), ("EP", "D")], ids="+".join)
async def test_a_request_whose_bans_leave_no_token_ends_alone(
    roles: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody looks as a step is launched: it is undone, with what was launched behind it, and found out then."""
    pools = {"image": 64, "kv": 256}
    placement = [Instance(each, f"i{n}", pools=pools, stages=[on_device], depth=2) for n, each in enumerate(roles)]
    wanted = await asyncio.to_thread(generated, "llava", 1)
    kept = next(each for each in range(100, 300) if each not in wanted.ids)
    asked = [
        Sampling(ignore_eos=True),
        Sampling(suppress_tokens=tuple(each for each in range(356) if each != kept), no_repeat_ngram_size=1),
        Sampling(begin_suppress_tokens=tuple(range(356))),
        Sampling(ignore_eos=True),
    ]
    async with Pipeline(checkpoint("llava"), placement, dtype="float32") as pipe:
        streams = [
            pipe.complete(Request(TEXTS[1], images=pictures(1), max_tokens=OUTPUTS, sampling=each)) for each in asked
        ]
        first, banned, begun, last = await asyncio.gather(*streams, return_exceptions=True)
        await pipe.wait_idle()
    for each in (first, last):
        assert isinstance(each, Output)
        assert each.token_ids == wanted.ids
    assert (type(banned), type(begun)) == (RequestError, RequestError)
    assert "token 1 of the output: suppress_tokens, no_repeat_ngram_size of the request" in str(banned)
    assert "token 0 of the output: begin_suppress_tokens of the request" in str(begun)
    assert not [each.getMessage() for each in caplog.records if each.levelname == "ERROR"], "no stage is at fault"
