"""Instances with other weights of equal size under one architecture: refused at once, or when the whole is read."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from memory.test_weight_digests import flip
from support.checkpoint_files import checkpoint
from support.running_instances import LIVENESS_S, POOLS, SECRET, request
from support.shared_launcher import sharing
from trinity.connector import Connector
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.messages import Value
from trinity.errors import ConfigError, LayoutMismatch, TrinityError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.memory.weight_digests import identify_files, known_whole_digest, sample_digest, whole_digest
from trinity.pipeline import Pipeline
from trinity.remote.channel.agreement import WeightsAgreement, check_layouts, hash_weights
from trinity.remote.channel.wire import (
    CheckFiles,
    FilesChecked,
    Hello,
    InstanceFailure,
    ModelIdentity,
    WeightsDigest,
    decode,
    encode,
)
from trinity.remote.instance_setup import identify_model
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.process_config import ProcessConfig, make_setups
from trinity.remote.supervision.supervisor_messages import Event, Lost
from trinity.runtime.loader import ServingConfig
from trinity.stages.models.loader import fingerprint_checkpoint, load_model
from trinity.timeline import Timeline

PADDING = 4 << 20  # bytes of a tensor that no model has: most of it is in no sample


def redraw(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor.dtype)


def copy_of_llava(target: Path, change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None) -> Path:
    """A copy with a large tensor that no model has, of which most is in no sample."""
    shutil.copytree(checkpoint("llava"), target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({**tensors, "padding": torch.zeros(PADDING, dtype=torch.uint8)}, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another seed, of just the same size."""
    return copy_of_llava(tmp_path_factory.mktemp("weights") / "theirs", redraw)


@pytest.fixture(scope="module")
def instance(theirs: Path) -> Iterator[Instance]:
    """``python -m trinity.instance --model`` of that directory, whatever the pipeline names."""
    command = [sys.executable, "-m", "trinity.instance", "--listen", "tcp:127.0.0.1:0", "--model", str(theirs)]
    environment = {**os.environ, "TRINITY_SECRET": SECRET}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as run:
        assert run.stdout is not None
        try:
            yield Instance("D", address=json.loads(run.stdout.readline())["listening"], pools=POOLS)
        finally:
            run.kill()


@pytest.fixture(scope="module")
def launcher(torch_launcher: Launcher) -> Iterator[Launcher]:
    with sharing(torch_launcher):
        yield torch_launcher


def serving(model: Path, *instances: Instance) -> Pipeline:
    terms = ProcessConfig(secret=SECRET)
    given = list(instances)
    return Pipeline(model, given, hosting="process", processes=terms, dtype="float32", failures=NO_RECOVERY)


async def test_weights_of_another_seed_are_refused_at_start(
    tmp_path: Path, theirs: Path, instance: Instance, launcher: Launcher
) -> None:
    ours = copy_of_llava(tmp_path / "ours")
    sizes = [{path.name: path.stat().st_size for path in where.glob("*")} for where in (ours, theirs)]
    assert sizes[0] == sizes[1]
    with pytest.raises(LayoutMismatch, match=r"trinity\.check --weights"):
        async with serving(ours, Instance("EP", pools=POOLS), instance):
            pass


async def test_a_flipped_bit_is_found_while_it_serves(
    tmp_path: Path, theirs: Path, instance: Instance, launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    """In a place that no sample reads: the younger is refused, and not let in again."""
    ours = shutil.copytree(theirs, tmp_path / "ours")
    flip_unseen(ours / "model.safetensors")
    assert sample_digest(ours) == sample_digest(theirs)
    assert whole_digest(ours) != whole_digest(theirs)
    async with serving(ours, Instance("EP", pools=POOLS), instance) as pipe:
        async with asyncio.timeout(LIVENESS_S):
            while "was lost: the weights of" not in caplog.text:
                await asyncio.sleep(0.05)
        async with asyncio.timeout(LIVENESS_S):
            with pytest.raises(TrinityError):
                await pipe.complete(request(900))
    assert "the younger is refused; compare both directories: python -m trinity.check --weights MODEL" in caplog.text


def flip_unseen(weights: Path) -> None:
    """Flip a bit of a file of ``copy_of_llava`` in a place that no sample reads."""
    assert any(_unseen(weights, at) for at in range(PADDING // 2, PADDING, 999))


def _unseen(weights: Path, at: int) -> bool:
    """Flip a bit where the sample does not see it."""
    before = sample_digest(weights.parent)
    flip(weights, at)
    if sample_digest(weights.parent) == before:
        return True
    flip(weights, at)
    return False


# ---------------------------------------------------------------- the parts


def test_lives_with_other_digests_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    weights = WeightsAgreement()
    for name, digest in (("E0", ""), ("P0", "a" * 64), ("E0", "a" * 64), ("P0", ""), ("P0", "a" * 64)):
        assert weights.compare(name, 0, digest) is None
    found = weights.compare("D0", 7, "b" * 64)
    assert found is not None
    assert found[:2] == ("P0", 0)
    assert "the weights of D0" in found.why
    assert "the younger is refused" in caplog.text
    found = weights.compare("E0", 0, "a" * 64)
    assert found is not None
    assert found[:2] == ("D0", 7)  # whoever told first: the core knows who is younger


def life(name: str, epoch: int, serves: ModelIdentity | None = None) -> Any:
    """What the agreement reads of a ``Setup``."""
    return SimpleNamespace(name=name, epoch=epoch, model="the/model", serves=serves)


def test_what_a_pipeline_began_with_binds_who_follows_when_nobody_is_left() -> None:
    weights = WeightsAgreement()
    assert weights.served is None
    for name in ("P0", "D0"):
        weights.admit(life(name, 0), Hello(name, "one"))
    assert weights.served == ModelIdentity("one")
    for name in ("P0", "D0"):
        assert weights.compare(name, 0, "a" * 64) is None
        weights.forget(name, 0)
    served = weights.served
    assert served == ModelIdentity("one", "a" * 64)
    for found in (
        Hello("P0", "another", weights="a" * 64),
        Hello("P0", "another"),
        Hello("P0", "one", weights="b" * 64),
    ):
        with pytest.raises(LayoutMismatch, match=r"instance P0 has .* in the/model, .*: put them back, or make a new"):
            weights.admit(life("P0", 1, served), found)
        weights.forget("P0", 1)
        assert weights.served == served, "who was refused binds nobody"
    weights.admit(life("P0", 2, served), Hello("P0", "one", weights="a" * 64))


def test_a_later_life_has_read_all_once_somebody_has() -> None:
    """Its digest could be told when a request has gone on there."""
    weights = WeightsAgreement()
    weights.admit(life("P0", 0), Hello("P0", "one"))
    weights.admit(life("D0", 1, weights.served), Hello("D0", "one"))  # nobody has: it is compared as it serves
    assert weights.compare("P0", 0, "a" * 64) is None
    weights.admit(life("E0", 0), Hello("E0", "one"))  # among the first
    with pytest.raises(ConfigError, match="D0 has not read all of its weights"):
        weights.admit(life("D0", 2, ModelIdentity("one")), Hello("D0", "one"))


def test_one_of_the_first_with_another_model_is_not_said_to_have_changed() -> None:
    weights = WeightsAgreement()
    weights.admit(life("P0", 0), Hello("P0", "one"))
    with pytest.raises(LayoutMismatch, match="P0 runs model one, D0 runs another: every"):
        weights.admit(life("D0", 0), Hello("D0", "another"))


def test_the_digest_that_stays_is_that_of_the_last_who_held_one() -> None:
    weights = WeightsAgreement()
    weights.admit(life("P0", 0), Hello("P0", "one", weights="a" * 64))
    assert weights.compare("D0", 0, "b" * 64) is not None
    weights.forget("D0", 0)  # as the younger
    weights.forget("P0", 7)  # of another life
    weights.forget("P0", 0)
    found = weights.compare("E0", 0, "b" * 64)  # it began with the others, and has read its files to the end by now
    assert found is not None
    assert found[:2] == ("", 0)
    assert f"those that it began with ({'a' * 64})" in found.why
    weights.forget("E0", 0)
    assert weights.compare("E0", 1, "a" * 64) is None
    assert weights.compare("E0", 1, "") is None


def test_who_is_alone_with_weights_that_differ_from_what_was_is_lost() -> None:
    """Nobody is there who could refuse it."""
    weights, heard = WeightsAgreement(), list[Event]()
    weights.admit(life("P0", 0), Hello("P0", "one", weights="a" * 64))
    weights.forget("P0", 0)
    client = InstanceClient(life("E0", 3), cast(Any, None), Timeline(), heard.append, weights=weights)
    client._take(WeightsDigest("a" * 64))
    assert heard == []
    weights.forget("E0", 3)
    client._take(WeightsDigest("b" * 64))
    [lost] = heard
    assert isinstance(lost, Lost)
    assert (lost.name, lost.epoch) == ("E0", 3)
    assert isinstance(client.problem, LayoutMismatch)


async def test_files_that_are_asked_of_a_life_that_is_lost_are_not_waited_for() -> None:
    weights = WeightsAgreement()
    weights.admit(life("P0", 0), Hello("P0", "one"))
    client: Any = InstanceClient(life("P0", 0), cast(Any, None), Timeline(), lambda event: None, weights=weights)
    client.started, client._channel = object(), SimpleNamespace(closed=False, send=lambda frame: None)
    for answer, raised in (
        (FilesChecked(), False),
        (FilesChecked(InstanceFailure("LayoutMismatch", "others")), True),
        (None, False),
    ):
        asked = asyncio.ensure_future(client.check_files())
        while client._checked is None or client._checked.done():
            await asyncio.sleep(0)
        client._take(answer) if answer is not None else await client._read(_ended())
        await asyncio.wait([asked], timeout=LIVENESS_S)
        assert isinstance(asked.exception(), LayoutMismatch) is raised
    await client.check_files()  # it has been lost before


async def _ended() -> AsyncIterator[bytes]:
    return
    yield


def test_a_life_is_refused_before_it_loads(tmp_path: Path) -> None:
    """By its files: in milliseconds where samples tell, and every byte is read where somebody has read them."""
    ours = copy_of_llava(tmp_path / "ours")
    config = ServingConfig(model=ours, dtype="float32", cache=CacheConfig(pools=POOLS))
    [setup] = make_setups([Instance("P", "P0")], config, Connector("shm"), "round_robin")
    fingerprint = fingerprint_checkpoint(ours, "float32")
    assert load_model(ours, "P", dtype="float32").fingerprint == fingerprint
    assert fingerprint_checkpoint(ours, "bfloat16") != fingerprint
    known = ModelIdentity(fingerprint, whole_digest(ours))
    for serves in (None, ModelIdentity(fingerprint), known):
        assert identify_model(msgspec.structs.replace(setup, serves=serves)) == identify_files(ours)
    flip_unseen(ours / "model.safetensors")
    identify_model(msgspec.structs.replace(setup, serves=ModelIdentity(fingerprint)))
    with pytest.raises(
        LayoutMismatch, match=r"instance P0 has weights of digest .*ours, .* under the running pipeline"
    ):
        identify_model(msgspec.structs.replace(setup, serves=known))
    flip(ours / "model.safetensors", 20)  # in its header
    with pytest.raises(LayoutMismatch, match=r"instance P0 has model .*ours, .* under the running pipeline"):
        identify_model(msgspec.structs.replace(setup, serves=ModelIdentity(fingerprint)))
    (ours / "config.json").write_text((ours / "config.json").read_text() + " ")
    with pytest.raises(LayoutMismatch, match="both must load the same checkpoint"):
        identify_model(setup)
    with pytest.raises(LayoutMismatch, match="under the running pipeline"):
        identify_model(msgspec.structs.replace(setup, serves=known))


def test_peers_with_other_digests_refuse_each_other() -> None:
    mine, theirs = Hello("P0", "same", weights="a" * 64), Hello("D0", "same", weights="b" * 64)
    with pytest.raises(LayoutMismatch):
        check_layouts(mine, theirs)
    for known in ("", "a" * 64):
        check_layouts(mine, Hello("D0", "same", weights=known))


def test_a_digest_travels() -> None:
    refused = FilesChecked(InstanceFailure("LayoutMismatch", "others"))
    for message in (WeightsDigest("a" * 64), Hello("P0", weights="b" * 64), CheckFiles(ModelIdentity("one")), refused):
        sent: Value = message
        assert decode(encode(sent)) == message


async def test_files_that_were_replaced_while_they_serve_have_no_digest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that is exchanged before its bytes were read: none of what served is said to be the new one's."""
    ours, other = (shutil.copytree(checkpoint("llama"), tmp_path / name) for name in ("ours", "other"))
    flip(other / "model.safetensors", (other / "model.safetensors").stat().st_size - 5)
    loaded = identify_files(ours)
    first = whole_digest(ours, loaded=loaded)
    assert first == known_whole_digest(ours, loaded)
    shutil.copystat(ours / "model.safetensors", other / "model.safetensors")  # of equal size and time, as by rsync
    (other / "model.safetensors").replace(ours / "model.safetensors")
    assert await hash_weights(ours, loaded) == known_whole_digest(ours, loaded) == ""
    assert whole_digest(ours, loaded=loaded) == ""
    assert "replaced since they were loaded" in caplog.text
    assert whole_digest(ours) not in ("", first)
    shutil.rmtree(ours)
    assert whole_digest(ours, loaded=loaded) == ""


async def test_hashing_ends_with_its_waiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert await hash_weights(checkpoint("llama")) == whole_digest(checkpoint("llama"))
    with pytest.raises(TrinityError, match="does not exist"):
        await hash_weights(tmp_path / "none")
    started = threading.Event()

    def slow(directory: Path, stop: Callable[[], bool], loaded: object) -> str:
        started.set()
        while not stop():
            threading.Event().wait(0.01)
        return "late"

    monkeypatch.setattr("trinity.remote.channel.agreement.whole_digest", slow)
    waiting = asyncio.ensure_future(hash_weights(tmp_path))
    while not started.is_set():
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while any(thread.name == "trinity-weights" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
