"""Hybrids, whose layers keep states: the tokens of ``generate()`` in every placement, moved, preempted, lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.arrivals import arrive_together
from support.hybrid_models import HELD, SERVED, TEXTS, build_hybrid, generated, hybrid_requests, zero_states
from support.moved_streams import read_moving
from support.pipeline_options import pipeline_options
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.pipeline import Pipeline

CHUNK = 13  # so that each prompt but one is cut, and decodes share steps with chunks
LATER = ("bamba", "qwen3_next", HELD)
COMMON: dict[str, Any] = {"dtype": "float32", "rules": BatchRules(token_budget=CHUNK)}
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp("hybrids") / name for name in SERVED}


def checkpoint_of(checkpoints: dict[str, Path], name: str) -> Path:
    folder = checkpoints[name]
    return folder if folder.exists() else build_hybrid(folder, name)


async def ask(pipe: Pipeline, outputs: int = 16) -> tuple[Tokens, list[Any]]:
    found = await asyncio.gather(*(pipe.complete(request) for request in hybrid_requests(outputs)))
    return [tuple(output.token_ids) for output in found], found


def serve(folder: Path, placement: str, length: int = 16, **options: Any) -> tuple[Tokens, list[Any]]:
    async def main() -> tuple[Tokens, list[Any]]:
        given = pipeline_options({"pools": {"kv": 64, "state": 3}, **COMMON, **options})
        async with Pipeline(folder, placement, **given) as pipe:
            if given.get("reservation") == "optimistic" and len(pipe.hosts) == 1:
                arrive_together(pipe, len(TEXTS))
            return await ask(pipe, length)

    return asyncio.run(main())


def moved_kinds(outputs: Sequence[Any]) -> set[str]:
    return {record["kind"] for output in outputs for record in output.transfers if record["outcome"] == "pulled"}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "PD": ("PD", {}),
    "1P1D": ("1P1D", {}),
    "2P2D": ("2P2D", {}),
    "rows alone": ("1P1D", {"rules": BatchRules(token_budget=1)}),
    "streamed": ("1P1D", {"transfers": TransferPolicy(kv="layer")}),
    "shm": ("1P1D", {"connector": "shm", "verify": "always"}),
    "processes": ("1P1D", {"hosting": "process", "connector": "shm"}),
    "depth": ("PD", {"depth": 2}),
    "preempted": ("PD", {"reservation": "optimistic", "pools": {"kv": 38, "state": 4}, "kv_block_size": 4}),
    "preempted at D": ("1P1D", {"reservation": "optimistic", "pools": {"kv": 40, "state": 4}, "kv_block_size": 4}),
    "one at a time": ("1P1D", {"pools": {"kv": 64, "state": 1}}),
    "pools without states": ("PD", {"pools": {"kv": 64}}),
    "sized": ("PD", {"pools": None}),
}
FAST = {("lfm2", "1P1D"), ("qwen3_5_text", "streamed"), ("lfm2", "preempted")}


def mark(name: str, case: str) -> Any:
    return pytest.param(name, case, marks=() if (name, case) in FAST else pytest.mark.slow, id=f"{name}-{case}")


@pytest.mark.parametrize(("name", "case"), [mark(name, case) for name in SERVED for case in CASES])
def test_tokens_of_generate(name: str, case: str, checkpoints: dict[str, Path]) -> None:
    folder, (placement, options) = checkpoint_of(checkpoints, name), CASES[case]
    length = 40 if case.startswith("preempted") else 16
    wanted = generated(folder, length)
    found, outputs = serve(folder, placement, length, **options)
    assert found == wanted
    assert len(set(wanted[0])) > 3, "tokens that do not vary show little"
    if "D" in placement and "PD" not in placement:
        assert moved_kinds(outputs) == {"kv", "state"}
    if case == "preempted":  # at a decode instance it depends on who comes when
        assert sum(output.preemptions for output in outputs), "the pool was large enough for all"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bamba", HELD))])
def test_the_control_zeroed_states_change_the_tokens(name: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoint_of(checkpoints, name)

    async def main() -> Tokens:
        async with Pipeline(folder, "1P1D", **pipeline_options({"pools": {"kv": 64}, **COMMON})) as pipe:
            zero_states(pipe)
            return (await ask(pipe))[0]

    assert asyncio.run(main()) != generated(folder)


@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in LATER)])
def test_a_decode_that_moves_takes_its_states_along(name: str, checkpoints: dict[str, Path]) -> None:
    folder = checkpoint_of(checkpoints, name)

    async def main() -> tuple[Tokens, int]:
        async with Pipeline(folder, "1P2D", **pipeline_options({"pools": {"kv": 64}, **COMMON})) as pipe:
            streams = [pipe.stream(request) for request in hybrid_requests()]
            found = await asyncio.gather(*(read_moving(each, ("D0", "D1")) for each in streams))
            return [tuple(output.token_ids) for output, _ in found], sum(moved for _, moved in found)

    tokens, moved = asyncio.run(main())
    assert moved >= 5
    assert tokens == generated(folder)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["P0", "D0"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", HELD])
def test_a_killed_instance_costs_no_wrong_token(name: str, victim: str, checkpoints: dict[str, Path]) -> None:
    """Its requests go on from their tokens: states are computed again, where nobody else has them."""
    folder = checkpoint_of(checkpoints, name)

    async def main() -> tuple[Tokens, int]:
        options = {"pools": {"kv": 64}, "hosting": "process", "connector": "shm", **COMMON}
        async with Pipeline(folder, "2P2D", **pipeline_options(options)) as pipe:
            process = pipe.processes[victim]
            streams = [pipe.stream(request) for request in hybrid_requests(outputs=40)]
            first = asyncio.Event()

            async def read(stream: Any) -> Any:
                async with stream as tokens:
                    async for token in tokens:
                        if token.index == 5:
                            first.set()
                return stream.output

            async def strike() -> None:
                await first.wait()
                os.kill(process.process, signal.SIGKILL)

            *outputs, _ = await asyncio.gather(*map(read, streams), strike())
            return [tuple(output.token_ids) for output in outputs], max(output.lives for output in outputs)

    tokens, lives = asyncio.run(main())
    assert tokens == generated(folder, 40)
    assert lives >= 1
