"""Tokens are those of generate() whatever moves when: KV by layers or groups, chunks, features ahead or not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import trinity
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.recordings import Recording, oracle
from support.shared_launcher import sharing
from support.stage_driver import pictures
from trinity.core.messages import Pull
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import KvMode, TransferPolicy
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request, Sampling

GREEDY = Sampling(ignore_eos=True)
POOLS = {"image": 96, "kv": 256}
WORDS = "one two three four five six seven eight nine ten " * 6
ARCHITECTURES = (
    "llava",
    "llama",
    pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
    pytest.param("gemma3", marks=pytest.mark.slow),
)
MODES: tuple[KvMode, ...] = ("off", "layer", "grouped")


def requests(name: str) -> list[Request]:
    asked = [Request(WORDS, max_tokens=24, sampling=GREEDY), Request(WORDS + "?", max_tokens=2, sampling=GREEDY)]
    asked.append(Request("Say it in one", max_tokens=1, sampling=GREEDY))
    if name != "llama":
        prompt = "<image> and <image>\n" + WORDS
        asked.append(Request(prompt, images=pictures(2), max_tokens=20, sampling=GREEDY))
        asked.append(Request("<image>\nWhat is this?", images=pictures(1, seed=9), max_tokens=20, sampling=GREEDY))
    return asked


async def serve(name: str, placement: str, **settings: Any) -> tuple[list[Output], Recording]:
    record = Recording()
    settings = {"dtype": "float32", "pools": POOLS, "image_block_size": 7, **settings}
    async with trinity.Pipeline(checkpoint(name), placement, **pipeline_options(settings)) as pipe:
        record.attach(pipe)
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests(name)))
    return list(outputs), record


def moved_kv(outputs: list[Output]) -> list[dict[str, Any]]:
    return [each for output in outputs for each in output.transfers if each["kind"] == "kv"]


@pytest.mark.parametrize("tokens", [2048, 24])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_generate_while_layers_and_chunks_move(name: str, mode: KvMode, tokens: int) -> None:
    wanted = oracle(name).generate_all(requests(name))
    placement = "P+D" if name == "llama" else "E+P+D"
    found = serve(
        name, placement, transfers=TransferPolicy(kv=mode), rules=BatchRules(token_budget=tokens, image_budget=60)
    )
    outputs, record = asyncio.run(found)
    assert [output.token_ids for output in outputs] == wanted
    pulls = [pull for _, pull in record.commands(Pull) if pull.kind == "kv"]
    records = moved_kv(outputs)
    assert len(records) == len(outputs) - 1, "one request ended with its first token"
    for each in records:
        assert each["mode"] == mode
        assert 0.0 <= each["overlap"] <= 1.0
    if mode == "off":
        assert all(pull.layers is None for pull in pulls)
        assert all(each["pulls"] == 1 for each in records)
    else:
        assert any(pull.layers is not None for pull in pulls), "several groups of layers moved"
        assert max(each["pulls"] for each in records) > 1


def test_tokens_equal_generate_where_streaming_begins_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first pulls every transfer counts as long here: prompts behind those stream."""
    monkeypatch.setattr("trinity.core.transfers.WORTH_S", 0.0)
    monkeypatch.setattr("trinity.core.instance.lifecycle.LEAST_PULLS", 2)
    wanted = oracle("llama").generate_all(requests("llama"))

    async def run() -> list[list[Output]]:
        settings = pipeline_options({"dtype": "float32", "pools": POOLS, "image_block_size": 7})
        async with trinity.Pipeline(checkpoint("llama"), "P+D", prefix_cache=False, **settings) as pipe:
            return [await asyncio.gather(*(pipe.complete(each) for each in requests("llama"))) for _ in range(2)]

    first, second = asyncio.run(run())
    assert [output.token_ids for output in first + second] == wanted * 2
    assert {each["mode"] for each in moved_kv(first)} == {"off"}
    assert {each["mode"] for each in moved_kv(second)} == {"grouped"}


@pytest.mark.parametrize(
    "chosen",
    [TransferPolicy(prefetch=False, kv="off"), TransferPolicy(early=False, kv="off"), TransferPolicy(kv="layer")],
)
def test_tokens_equal_generate_in_processes_over_shm(chosen: TransferPolicy, torch_launcher: Launcher) -> None:
    wanted = oracle("llava").generate_all(requests("llava"))

    async def run() -> list[Output]:
        with sharing(torch_launcher):
            rules = BatchRules(token_budget=48)
            outputs, _ = await serve("llava", "E+P+D", hosting="process", transfers=chosen, rules=rules)
            return outputs

    outputs = asyncio.run(run())
    assert [output.token_ids for output in outputs] == wanted
    records = moved_kv(outputs)
    assert {each["scheme"] for each in records} == {"shm"}
    assert {each["mode"] for each in records} == {chosen.kv}
    assert (max(each["pulls"] for each in records) > 1) == (chosen.kv == "layer")


def test_an_ed_instance_pulls_layers_while_it_encodes_and_decodes() -> None:
    wanted = oracle("llava").generate_all(requests("llava"))
    outputs, record = asyncio.run(
        serve("llava", "ED+P", transfers=TransferPolicy(kv="layer"), rules=BatchRules(token_budget=48))
    )
    assert [output.token_ids for output in outputs] == wanted
    assert any(pull.layers is not None for _, pull in record.commands(Pull))
