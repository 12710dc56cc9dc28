"""Weights that processes of one host share: exact tokens, one copy, and whoever loaded them may be killed.

The checkpoint is in bfloat16 and served in float32, so that no process can map its files. What counts memory is the
system: the pages of each process's mappings, each divided by those who have it (PSS of /proc/PID/smaps).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoint_files import checkpoint
from support.lender import LIVENESS_S
from support.pipeline_options import pipeline_options
from support.running_instances import GREEDY, PHOTOS, POOLS
from support.shared_launcher import sharing
from trinity.errors import RequestError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Request
from trinity.testing.oracle import Oracle

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+)\s+/memfd:trinity-weights")


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    with sharing(torch_launcher):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaVA's tiny checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16") / "llava"
    shutil.copytree(checkpoint("llava"), folder)
    weights = {name: each.to(torch.bfloat16) for name, each in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    return Oracle(model).generate_all(requests())


def requests() -> list[Request]:
    asked = [("<image>\nWhat is this?", 1), ("Only text", 0), ("<image> and <image>", 2)]
    return [Request(text, images=PHOTOS[:count], max_tokens=10, sampling=GREEDY) for text, count in asked]


def weights_of(process: int) -> dict[str, tuple[str, int]]:
    """Permissions and PSS in bytes of each file of weights that a process has mapped, by the file's number."""
    found, number = {}, ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if match := MAPPING.match(line):
            number = match[2]
            found[number] = (match[1], 0)
        elif re.match(r"^[0-9a-f]+-", line):
            number = ""
        elif number and line.startswith("Pss:"):
            found[number] = (found[number][0], int(line.split()[1]) << 10)
    return found


async def settled(pipe: Pipeline) -> list[list[int]]:
    """The answers to all requests, once the instances are back that some may have lost."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                return [(await pipe.complete(request)).token_ids for request in requests()]
            except RequestError:
                await asyncio.sleep(0.05)


def sizes(model: Path) -> int:
    from trinity.stages.models.loader import count_weight_bytes

    return count_weight_bytes(model, "P", dtype="float32")


async def test_whoever_loaded_may_be_killed(model: Path, wanted: list[list[int]]) -> None:
    """Each in turn: those that read go on, and those that start again take what is there. No token is another."""
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": POOLS}
    placement = [Instance(roles, pack=False) for roles in ("EP", "D")]  # if packing is faster, is measured
    async with Pipeline(model, placement, **pipeline_options(settings)) as pipe:
        assert await settled(pipe) == wanted
        found = {name: weights_of(member.process) for name, member in pipe.processes.items()}
        assert [len(each) for each in found.values()] == [2, 1], "its vision and language parts; the language part"
        (number,) = set(found["EP0"]) & set(found["D0"])
        assert all(each[number][0].startswith("r--") for each in found.values()), "nobody can write"
        total = sum(each[number][1] for each in found.values())
        assert 0.9 * sizes(model) < total < 1.1 * sizes(model) + 65536
        for victim in ("EP0", "D0"):
            running = asyncio.gather(*map(pipe.complete, requests()), return_exceptions=True)
            os.kill(pipe.processes[victim].process, signal.SIGKILL)
            for output, tokens in zip(await running, wanted, strict=True):
                assert isinstance(output, RequestError) or getattr(output, "token_ids", None) == tokens
            async with asyncio.timeout(LIVENESS_S):
                while pipe.processes[victim].setup.epoch != 1:
                    await asyncio.sleep(0.02)
            assert await settled(pipe) == wanted
        assert {tuple(weights_of(member.process)) for member in pipe.processes.values()} == {
            tuple(each) for each in found.values()
        }, "no process has loaded again"


async def test_a_checkpoints_own_dtype_is_mapped_from_its_files(model: Path) -> None:
    settings: dict[str, Any] = {"hosting": "process", "pools": POOLS}
    async with Pipeline(checkpoint("llava"), "EPD", **pipeline_options(settings)) as pipe:
        assert [weights_of(member.process) for member in pipe.processes.values()] == [{}]
