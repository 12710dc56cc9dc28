"""Plans, traces and profiles of any content, of any kind of file, on a full disk: typed errors, nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import resource
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trinity
from support.paths import ROOT
from support.plans import plan as sound_plan
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import CostTables
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError, TrinityError
from trinity.errors.files import read_regular_file, unzip, write_file
from trinity.planner import Plan
from trinity.traces.trace import Trace

pytestmark = pytest.mark.timeout(60)
LOADERS: dict[str, Callable[[Path], object]] = {
    "plan": Plan.load,
    "trace": Trace.load,
    "profile": CostTables.load,
    "model": lambda path: get_model_shape(str(path)),
}


@pytest.fixture(params=LOADERS)
def load(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return LOADERS[request.param]


CONTENTS: dict[str, bytes] = {
    "nothing but a bracket": b"{",
    "brackets without end": b"[" * 1_000_000,
    "objects without end": b'{"a":' * 200_000,
    "no text": bytes(range(128, 256)),
    "zeros": b"\0" * 4096,
    "half a gzip": gzip.compress(b"{}" * 1000)[:40],
    "a false gzip": b"\x1f\x8b" + b"\xff" * 100,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_contents_that_are_nothing(load: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(TrinityError):
        load(path)


def test_files_that_are_none(load: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), Path("/proc/self/mem"), tmp_path / "pipe", tmp_path, tmp_path / "gone"):
        with pytest.raises(TrinityError):
            load(path)
    with pytest.raises(TrinityError):
        load(Path("a\0b"))


def test_a_small_gzip_of_gigabytes_is_not_unpacked(tmp_path: Path) -> None:
    piece = gzip.compress(b"\0" * (1 << 24))
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(piece * 100)  # 1.6 GB in 1.6 MB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="unpacks to more than 67,108,864 bytes"):
        unzip(path.read_bytes(), path, most=1 << 26)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 1 << 29


@pytest.mark.parametrize("content", [b"", b"a", b"a" * 100_000])
def test_what_gzip_writes_is_read(content: bytes) -> None:
    packed = gzip.compress(content)
    assert unzip(packed, "x") == content
    assert unzip(packed + packed + b"\0" * 9, "x") == content * 2
    with pytest.raises(ConfigError, match="ends too soon"):
        unzip(packed[:-3], "x")


def test_a_file_that_is_too_long_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="more than 1,000 bytes"):
        read_regular_file(path, most=1000)


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """Values to put in the place of any part of a plan."""
    odd: list[Any] = [
        None,
        -1,
        0,
        1e308,
        -1e308,
        10**30,
        "",
        "x",
        "999999999E",
        [],
        {},
        True,
        [[]],
        "EPD" * 1000,
        "1E-1P",
    ]
    return st.sampled_from(odd) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)


@st.composite
def changed_plans(draw: st.DrawFn) -> bytes:
    whole = sound_plan().to_dict()
    for _ in range(draw(st.integers(1, 3))):
        inner: Any = whole
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw(st.sampled_from(keys))
            if isinstance(inner[key], (dict, list)) and inner[key] and draw(st.integers(0, 3)):
                inner = inner[key]
                continue
            inner[key] = draw(mutations(inner[key]))
            break
    return msgspec.json.encode(whole)


@settings(max_examples=200)
@given(content=changed_plans())
def test_a_changed_plan_is_refused_or_can_be_told_and_asked_for(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed-plan.json"
    path.write_bytes(content)
    with contextlib.suppress(TrinityError):
        plan = Plan.load(path)
        plan.explain()
        list(plan.rows())
        trinity.Pipeline(EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost()), plan)


@settings(max_examples=200)
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused_or_read(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any-bytes.json"
    path.write_bytes(content)
    for each in LOADERS.values():
        with contextlib.suppress(TrinityError):
            each(path)


# ---------------------------------------------------------------- a full disk


FULL = """
import sys, trinity
from support.plans import plan
from trinity.errors import ConfigError
from trinity.timeline import Timeline
from pathlib import Path
folder = Path(sys.argv[1])
filler = (folder / "filler").open("wb", buffering=0)
try:
    while True:
        filler.write(bytes(4096))
except OSError:
    pass
timeline = Timeline()
for n in range(2000):
    timeline.add("E0", "joint", "encode", float(n), n + 1.0)
rows = [{"timestamp": n, "input_length": 1, "output_length": 1} for n in range(2000)]
for write in (plan().save, trinity.Trace(rows).save, timeline.save):
    try:
        write(folder / "out.json")
    except ConfigError as error:
        print(error)
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk(tmp_path: Path) -> None:
    """A disk of 64 KB of its own, in a mount namespace."""
    script = tmp_path / "full.py"
    script.write_text(FULL)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=64k none {disk} && exec {sys.executable} {script} {disk}"
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *sys.path[1:2]])}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, env={**os.environ, **paths}, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 4, said
    assert all(line.startswith("cannot write") and os.strerror(errno.ENOSPC) in line for line in said[:3])
    assert said[3] == "['filler']", "nothing half written is left"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_file(path, b"old")
    with pytest.raises(ConfigError, match="cannot write"):
        write_file(tmp_path / "no-such-folder" / "plan.json", b"new")
    monkeypatch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot write"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("path", ["", "/", ".", "a\0b", None, 3.5, "n" * 300, "half \ud800"], ids=repr)
def test_a_name_that_is_none_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        write_file(path, b"x")
    assert not os.listdir(tmp_path)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("n" * 255), b"x")
    assert [len(name) for name in os.listdir(tmp_path)] == [255]


def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    real, link, new = tmp_path / "folder" / "real.json", tmp_path / "link.json", tmp_path / "new.json"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to(real)
    new.symlink_to("folder/made.json")
    write_file(link, b"x")
    write_file(new, b"y")
    assert (link.is_symlink(), real.read_bytes(), real.stat().st_mode & 0o777) == (True, b"x", 0o640)
    assert (new.is_symlink(), (tmp_path / "folder" / "made.json").read_bytes()) == (True, b"y")
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.json", "new.json"]


def test_what_is_no_regular_file_is_written_into(tmp_path: Path) -> None:
    """As root a rename would put a file in the place of a device, for every program."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="cannot write"):  # nobody reads: it would wait
        write_file(pipe, b"x")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"content")
    assert os.read(reader, 100) == b"content"
    (tmp_path / "link").symlink_to(pipe)
    write_file(tmp_path / "link", b"more")
    assert os.read(reader, 100) == b"more"
    os.close(reader)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    done = subprocess.run([sys.executable, "-c", STDOUT], capture_output=True, check=True, env={**os.environ, **PATHS})
    assert done.stdout == b"said"
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


PATHS = {"PYTHONPATH": str(ROOT / "src")}
STDOUT = "from trinity.errors.files import write_file; write_file('/dev/stdout', b'said')"


@pytest.mark.parametrize("padding", [b"", b"\0" * 3, b"\0" * 70_000])
def test_each_member_of_gzip_is_read_once(padding: bytes) -> None:
    """Bytes that are decompressed are counted: each was copied once for every member before it."""
    parts = [os.urandom(size) for size in (0, 1, 700, 100_000, 3_000_000, 5)]
    whole = b"".join(gzip.compress(part, 1) + padding for part in parts)
    assert unzip(whole, "x") == b"".join(parts)
    for cut in (len(whole) - len(padding) - 1, 5, 1_000_000):
        with pytest.raises(ConfigError, match="cut off or damaged"):
            unzip(whole[:cut], "x")


def test_many_members_of_gzip_cost_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    make, fed = zlib.decompressobj, [0]

    class Counting:
        def __init__(self, **named: Any) -> None:
            self._real = make(**named)

        def decompress(self, data: bytes, most: int) -> bytes:
            fed[0] += len(data)
            return self._real.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    content = gzip.compress(b"") * 5000
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    assert unzip(content, "x") == b""
    assert fed[0] < 100 * len(content)
