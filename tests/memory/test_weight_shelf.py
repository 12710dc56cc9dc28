"""Weights left for others: one loads, the others wait and take; whoever ends in his turn leaves it to the next."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from trinity.memory import weight_shelf
from trinity.memory.shared_regions import SharedRegion, make_region, open_region
from trinity.memory.weight_shelf import WeightShelf, open_shelf, take_turn

LIVENESS_S = 120.0


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


def wait_until(true: Callable[[], object]) -> None:
    end = time.monotonic() + LIVENESS_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


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
    wait_until(lambda: shelf._parts)
    os.kill(loader, signal.SIGKILL)
    os.waitpid(loader, 0)
    assert load_or_take(shelf.path, "part", 1) == (False, 9)


# ---------------------------------------------------------------- what the system does not give for a moment


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What the next starts of the shelf's threads raise, one each; a system cannot be made to refuse root a thread."""
    raised = list[BaseException]()
    start = threading.Thread.start

    def may_start(thread: threading.Thread) -> None:
        if thread.name == "trinity-weights" and raised:
            raise raised.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_start)
    return raised


def test_a_shelf_outlasts_a_lack_of_descriptors(shelf: WeightShelf, caplog: pytest.LogCaptureFixture) -> None:
    """Fails at 8235ded: nobody listened any more, and who asked was not refused, but waited for 15 minutes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller, caplog.at_level(logging.WARNING, "trinity"):
        caller.settimeout(LIVENESS_S)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            caller.connect(shelf.path)
            wait_until(lambda: "weights" in caplog.text)
            time.sleep(3 * weight_shelf.LACK_PAUSE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        weight_shelf._send(caller, b"part")
        assert caller.recv(4) == bytes(4), "its turn"
    assert len(caplog.records) == 1, "one word for all tries"
    assert "Too many open files" in caplog.text
    assert load_or_take(shelf.path, "part", 4) == (True, 4)


def test_who_gets_no_thread_loads_for_himself(
    tmp_path: Path, starts: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Fails at 8235ded: the listener ended, and ``close`` raised, before the pipeline's folder was removed."""
    shelf = WeightShelf(tmp_path / "weights.sock")
    try:
        starts.append(RuntimeError("can't start new thread"))
        alone(shelf.path, caplog)
        assert not starts
        assert load_or_take(shelf.path, "part", 4) == (True, 4)
    finally:
        shelf.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_ends_keeps_nobody_waiting(
    shelf: WeightShelf, starts: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever: who asks later is refused at once."""
    starts.append(SystemExit())
    alone(shelf.path, caplog)
    shelf._listener.join(LIVENESS_S)
    alone(shelf.path, caplog)
    assert "Connection refused" in caplog.text


def test_a_pipeline_whose_shelf_gets_no_thread_starts_without(
    tmp_path: Path, starts: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    starts.append(RuntimeError("can't start new thread"))
    with caplog.at_level(logging.WARNING, "trinity"):
        assert open_shelf(tmp_path) is None
    assert "share no weights" in caplog.text
    alone(str(tmp_path / "weights.sock"), caplog)


# ---------------------------------------------------------------- descriptors that nobody takes


def sealed() -> SharedRegion:
    """A region whose descriptors the guard of all tests counts, as soon as nobody has it."""
    made = make_region("cpu", 64)
    made.seal()
    return made


def test_a_part_that_is_not_taken_is_let_go(tmp_path: Path) -> None:
    """Fails at 8235ded: the descriptor stayed, and with it the part, after its shelf had gone."""
    region = sealed()
    shelf = WeightShelf(tmp_path / "weights.sock")
    with take_turn(shelf.path, "part") as turn:
        turn.leave(region.size, b"", region.file)
    wait_until(lambda: shelf._parts)
    with take_turn(shelf.path, "part") as turn:
        assert turn.part is not None
    with suppress(ValueError), take_turn(shelf.path, "part"):
        raise ValueError("no modules for it")
    shelf.close()


@pytest.mark.parametrize("frames", [[b"part"], [b"part", b"\xff"], [b"part", b""], [b"a", b"\x82\xa4size"]])
def test_the_shelf_keeps_no_descriptor_that_comes_with_nonsense(shelf: WeightShelf, frames: list[bytes]) -> None:
    """Fails at 8235ded."""
    region = sealed()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(shelf.path)
        for each in frames:
            weight_shelf._send(caller, each, [region.file])
        caller.shutdown(socket.SHUT_WR)
        caller.settimeout(LIVENESS_S)
        while caller.recv(100):
            pass
    assert not shelf._parts


@pytest.mark.parametrize("answer", [b"", b"\xff", b"\x82\xa4size\x40\xa5table\xc4\x00", b"\x81\xa4size\x40"])
def test_an_answer_without_sense_leaves_no_descriptor(tmp_path: Path, answer: bytes) -> None:
    """Fails at 8235ded."""
    region, path = sealed(), str(tmp_path / "weights.sock")

    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as caller:
            assert caller.recv(8, socket.MSG_WAITALL) == b"\0\0\0\4part"
            weight_shelf._send(caller, answer, [region.file])

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(path)
        listening.listen()
        served = pool.submit(serve, listening)
        with take_turn(path, "part") as turn:
            assert turn.part is None or answer.startswith(b"\x82")
        served.result(LIVENESS_S)


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
