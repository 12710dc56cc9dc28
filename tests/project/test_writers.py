"""Fields of a core's state have few writers: the check sees every form of a write, and holds for the cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import ROOT
from tools import check_writers

STATE = """
Flights = dict[str, deque[Running]]

class DecodeBatch:
    def clear_all(self) -> None: ...

class RequestState:
    block_table: tuple[int, ...] = ()
    spans: dict[str, float]
    incoming: IncomingTransfer | None = None

    def grow(self, blocks):
        self.block_table += blocks

class IncomingTransfer:
    moved: bool
    ready_parts: set[int]

class State:
    def __init__(self) -> None:
        self.requests: dict[str, RequestState] = {}
        self.revoked_blocks: dict[str, set[int]] = {}
        self.lanes: Flights = {}
        self.report_at = self.reported_at = 0.0
        self.decode_batch = DecodeBatch()

    @property
    def oldest(self) -> RequestState: ...

def found(s: State) -> list[RequestState]: ...
"""
MAKING = {
    ("State", name) for name in ("requests", "revoked_blocks", "lanes", "report_at", "reported_at", "decode_batch")
}
ALONE = {("RequestState", "block_table")} | MAKING  # what its own module writes


def package(root: Path, **modules: str) -> list[Path]:
    """Modules with one function each, of these lines."""
    folder = root / check_writers.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.py").write_text(STATE)
    for name, lines in modules.items():
        body = "\n".join(f"    {line}" for line in lines.splitlines())
        (folder / f"{name}.py").write_text(f"def work(s: State, state: RequestState, name: str) -> None:\n{body}\n")
    return list(folder.rglob("*.py"))


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("state.block_table = ()", "RequestState.block_table"),
        ("state.block_table += (1,)", "RequestState.block_table"),
        ("state.block_table, s.report_at = (), 1.0", "RequestState.block_table"),
        ("s.oldest.block_table = ()", "RequestState.block_table"),
        ("s.requests[name].block_table = ()", "RequestState.block_table"),
        ("s.requests.pop(name).block_table = ()", "RequestState.block_table"),
        ("s.requests[name] = state", "State.requests"),
        ("del s.requests[name]", "State.requests"),
        ("s.requests.clear()", "State.requests"),
        ("state.spans[name] = 1.0", "RequestState.spans"),
        ("state.spans[name] += 1.0", "RequestState.spans"),
        ("state.spans.setdefault(name, 0.0)", "RequestState.spans"),
        ("state.incoming.ready_parts.add(1)", "IncomingTransfer.ready_parts"),
        ("incoming = state.incoming\nincoming.moved = True", "IncomingTransfer.moved"),
        (
            "if (incoming := s.requests[name].incoming) is not None:\n    incoming.moved = True",
            "IncomingTransfer.moved",
        ),
        ("ready = state.incoming.ready_parts\nready.discard(1)", "IncomingTransfer.ready_parts"),
        ("for each in s.requests.values():\n    each.block_table = ()", "RequestState.block_table"),
        ("for name, each in s.requests.items():\n    each.block_table = ()", "RequestState.block_table"),
        ("for each in sorted(found(s), key=age):\n    each.block_table = ()", "RequestState.block_table"),
        ("for each, block in zip(found(s), (1,)):\n    each.block_table += (block,)", "RequestState.block_table"),
        ("for each in [s.requests[one] for one in (name,)]:\n    each.block_table = ()", "RequestState.block_table"),
        ("youngest = max((each for each in found(s)), key=age)\nyoungest.block_table = ()", "RequestState.block_table"),
        ("s.revoked_blocks[name].update((1,))", "State.revoked_blocks"),
        ("revoked_blocks = s.revoked_blocks[name]\nrevoked_blocks.difference_update((1,))", "State.revoked_blocks"),
        ("flight = s.lanes[name]\nflight.popleft()", "State.lanes"),
        ("s.decode_batch.clear()", "State.decode_batch"),
        ("heapq.heappush(s.requests, name)", "State.requests"),
        ("def inner() -> None:\n    state.block_table = ()", "RequestState.block_table"),
    ],
)
def test_every_form_of_a_write_is_seen(tmp_path: Path, lines: str, field: str) -> None:
    found = check_writers.writers(package(tmp_path, other=lines))
    assert "other" in found[tuple(field.split("."))]  # type: ignore[index]


@pytest.mark.parametrize(
    "lines",
    [
        "kv = state.block_table\nkv = ()",
        "state.grow((1,))",
        "s.decode_batch.clear_all()",
        "mine: list[int] = []\nmine.append(1)",
        "found = [each for each in s.requests]\nfound.append(name)",
        "return s.requests[name].block_table[0]",
    ],
)
def test_what_changes_no_field_is_none(tmp_path: Path, lines: str) -> None:
    found = check_writers.writers(package(tmp_path, other=lines))
    assert {field for field, modules in found.items() if "other" in modules} == set()
    assert set(found) == ALONE


def test_a_third_writer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package(tmp_path, one="state.block_table = ()")
    assert check_writers.main(tmp_path, listed=True) == 0
    told = capsys.readouterr().out
    assert "RequestState.block_table: one, state\n" in told
    assert "7 fields of a core's state, each written by at most 2 modules" in told
    package(tmp_path, two="state.block_table = ()")
    assert check_writers.main(tmp_path) == 1
    assert "RequestState.block_table is written by 3 modules, at most 2: one, state, two" in capsys.readouterr().out


def test_a_write_to_what_has_no_type_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It might be a field; a name that no field has is nobody's business."""
    package(tmp_path, one="thing = unheard(s)\nthing.block_table = ()\nthing.other = 1")
    assert check_writers.main(tmp_path) == 1
    assert capsys.readouterr().out == "one:3 writes thing.block_table, whose type no annotation tells\n"


def test_the_cores_keep_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_writers.main(ROOT) == 0, capsys.readouterr().out
