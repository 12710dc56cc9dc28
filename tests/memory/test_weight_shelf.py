"""Weights left for others: one loads, the others wait and take; whoever ends in his turn leaves it to the next."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from trinity.memory import weight_shelf
from trinity.memory.shared_regions import make_region, open_region
from trinity.memory.weight_shelf import WeightShelf, open_shelf, take_turn

LIVENESS_S = 30.0


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightShelf]:
    made = WeightShelf(tmp_path / "weights.sock")
    yield made
    made.close()


def load_or_take(path: str, key: str, value: int, pause_s: float = 0.0) -> tuple[bool, int]:
    """What an instance does: whether it loaded, and the value that it has."""
    with take_turn(path, key) as turn:
        if turn.part is not None:
            region = open_region("cpu", turn.file, turn.part.size)
            assert turn.part.table == key.encode() * 2000
            return False, int(region.view(0, (1,), torch.int64))
        time.sleep(pause_s)
        region = make_region("cpu", 64)
        region.write(0, torch.tensor([value]))
        region.seal()
        turn.leave(region.size, key.encode() * 2000, region.file)
        return True, value


def test_one_loads_and_the_others_wait_and_take(shelf: WeightShelf) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda value: load_or_take(shelf.path, "part", value, 0.05), range(6)))
    assert sum(loaded for loaded, _ in found) == 1
    assert len({value for _, value in found}) == 1


def test_parts_of_other_keys_wait_for_nobody(shelf: WeightShelf) -> None:
    with take_turn(shelf.path, "one") as turn:
        assert turn.part is None
        assert load_or_take(shelf.path, "other", 7) == (True, 7)


def test_a_part_stays_when_nobody_has_it(shelf: WeightShelf) -> None:
    load_or_take(shelf.path, "part", 5)
    assert load_or_take(shelf.path, "part", 6) == (False, 5)


def run_forked(act: Callable[[], object]) -> int:
    process = os.fork()
    if not process:
        try:
            act()
        finally:
            os._exit(0)
    return process


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_turn_of_one_that_ends_goes_to_the_next(shelf: WeightShelf, how: str) -> None:
    """It may be the first of several: each who waits gets it in turn, until one has loaded."""
    ours, theirs = socket.socketpair()

    def load() -> None:
        with take_turn(shelf.path, "part") as turn:
            assert turn.part is None
            theirs.send(b"!")
            if how == "killed":
                signal.pause()
            raise ValueError("a file cannot be read")

    with ours, theirs, ThreadPoolExecutor(3) as pool:
        loader = run_forked(load)
        assert ours.recv(1) == b"!"
        waiting = [pool.submit(load_or_take, shelf.path, "part", value) for value in range(3)]
        if how == "killed":
            time.sleep(0.1)
            assert not any(each.done() for each in waiting), "it is another's turn"
            os.kill(loader, signal.SIGKILL)
        found = [each.result(LIVENESS_S) for each in waiting]
    os.waitpid(loader, 0)
    assert sum(loaded for loaded, _ in found) == 1
    assert len({value for _, value in found}) == 1


def test_a_part_outlasts_who_left_it(shelf: WeightShelf) -> None:
    def load() -> None:
        load_or_take(shelf.path, "part", 9)
        signal.pause()

    loader = run_forked(load)
    end = time.monotonic() + LIVENESS_S
    while not shelf._parts and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)
    assert load_or_take(shelf.path, "part", 1) == (False, 9)


# ---------------------------------------------------------------- no shelf, no answer, no sense


def alone(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "trinity"), take_turn(path, "part") as turn:
        assert turn.part is None
        region = make_region("cpu", 64)
        turn.leave(region.size, b"", region.file)
    assert "weights are loaded for this process alone" in caplog.text


def test_without_a_shelf_everybody_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone(str(tmp_path / "nothing.sock"), caplog)


def test_a_pipeline_that_ends_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = WeightShelf(tmp_path / "weights.sock")
    with ThreadPoolExecutor(1) as pool, take_turn(shelf.path, "part"):
        waiting = pool.submit(alone, shelf.path, caplog)
        time.sleep(0.1)
        shelf.close()
        waiting.result(LIVENESS_S)
    shelf.close()
    assert not [each for each in threading.enumerate() if each.name == "trinity-weights"]


def test_an_answer_takes_no_longer_than_a_load_may(
    shelf: WeightShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_shelf, "PATIENCE_S", 0.05)
    with take_turn(shelf.path, "part"):
        alone(shelf.path, caplog)


@pytest.mark.parametrize(
    "sent", [b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\4\xff\xff\xff\xff", b"\0\0\0\4key!\0\0\0\1\x07"]
)
def test_nonsense_harms_nobody_else(shelf: WeightShelf, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(shelf.path)
        caller.sendall(sent)
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(LIVENESS_S)
        while caller.recv(100):
            pass
    assert load_or_take(shelf.path, "key!", 3) == (True, 3)


def test_a_part_without_its_descriptor_is_not_kept(shelf: WeightShelf) -> None:
    with take_turn(shelf.path, "part") as turn:
        assert turn._shelf is not None
        weight_shelf._send(turn._shelf, msgspec.msgpack.encode(weight_shelf.SharedPart(64, b"")))
    assert load_or_take(shelf.path, "part", 2) == (True, 2)


def test_a_folder_whose_name_is_too_long_has_no_shelf(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one on a disk that is full: the pipeline starts without."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with caplog.at_level(logging.WARNING, "trinity"):
        assert open_shelf(folder) is None
    assert "share no weights" in caplog.text
