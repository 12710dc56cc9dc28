"""One check for rows: what is no time or length is refused wherever a row is made, and so by every door behind it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import ConfigError, TraceError
from trinity.traces import read_trace
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

GOOD: dict[str, Any] = {"timestamp": 5.0, "input_length": 40, "output_length": 3}
NO_TIME = [math.nan, math.inf, -math.inf, -1.0, -5e-324, True, "1", None, 10**400, np.float32(np.nan), np.int64(-1)]
NO_COUNT = [-1, 1.0, math.nan, True, "1", 2**41, 10**30, np.int64(-1), np.float64(1)]
BAD: list[tuple[str, Any]] = [
    *(("timestamp", each) for each in NO_TIME),
    *((name, each) for name in ("input_length", "output_length") for each in (*NO_COUNT, None)),
    *((name, each) for name in ("text_length", "max_tokens") for each in NO_COUNT),
    *((name, each) for name in ("ttft_s", "latency_s", "late_s") for each in (math.nan, -1.0, math.inf)),
    *(("itl_s", [0.1, each]) for each in (math.nan, -1.0)),
    ("itl_s", 3),
    ("hash_ids", [1, -1]),
    ("hash_ids", [1.5]),
    ("hash_ids", 7),
    ("images", [{"tokens": "many"}]),
    ("images", [{"tokens": -4}]),
    ("images", 3),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: f"{value!r:.20}")
def test_no_row_is_made_of_it(name: str, value: Any) -> None:
    with pytest.raises(TraceError):
        TraceRow(**{**GOOD, name: value})
    with pytest.raises(TraceError):
        msgspec.structs.replace(TraceRow(**GOOD), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("timestamp", -1.0), ("input_length", -5), ("output_length", 2**41), ("images", [{"tokens": -4}]), ("itl_s", 3)],
)
def test_mappings_and_files_refuse_it_too(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(msgspec.json.encode(GOOD) + b"\n" + msgspec.json.encode({**GOOD, name: value}) + b"\n")
    with pytest.raises(TraceError):
        Trace([{**GOOD, name: value}])
    for read in (Trace.load, lambda name: read_trace(name, "trinity")):
        with pytest.raises(TraceError, match="line 2"):
            read(path)


def test_texts_and_bools_of_numpy_become_plain(tmp_path: Path) -> None:
    row = TraceRow(
        **GOOD,
        finish_reason=np.str_("stop"),
        request_id=np.str_("é"),
        emulated=np.True_,  # type: ignore[arg-type]
        spans={np.str_("encode"): np.float64(2)},
        images=[TraceImage(content=np.str_("abc"))],
    )
    plain = TraceRow(**GOOD, finish_reason="stop", request_id="é", emulated=True, images=[TraceImage(content="abc")])
    assert msgspec.structs.replace(plain, spans={"encode": 2.0}) == row
    told = (row.finish_reason, row.request_id, row.emulated, *row.spans, row.images[0].content)
    assert [type(each) for each in told] == [str, str, bool, str, str]
    Trace([row]).save(tmp_path / "rows.jsonl")
    assert list(Trace.load(tmp_path / "rows.jsonl")) == [row]
    served = TraceRow(**GOOD, itl_s=[0.1, 0.1], ttft_s=0.5, finish_reason="stop")
    assert SLO(1.0, 1.0).is_met(served, np.str_("p99"))  # type: ignore[arg-type]
    assert Trace([row]).attainment(SLO(1.0, 1.0), np.str_("tpot")) == 0  # type: ignore[arg-type]
    bad: list[tuple[str, Any]] = [("finish_reason", np.str_("\ud800")), ("request_id", 5), ("emulated", 1)]
    for name, value in (*bad, ("spans", {5: 1.0}), ("spans", [])):
        with pytest.raises(TraceError):
            TraceRow(**{**GOOD, name: value})


class Named:
    """A path of somebody's own class."""

    def __init__(self, path: str | bytes) -> None:
        self.path = path

    def __fspath__(self) -> str | bytes:
        return self.path


def test_any_path_is_one(tmp_path: Path) -> None:
    """Names are bytes: not all of them are UTF-8 (PEP 383)."""
    folder, trace = str(tmp_path), Trace([GOOD])
    odd = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.jsonl")
    paths: list[Any] = [odd, Path(odd), Named(odd), Named(os.fsencode(odd)), np.str_(f"{folder}/n.jsonl")]
    for number, path in enumerate(paths):
        Trace([GOOD] * (number + 1)).save(path)
        assert len(Trace.load(path)) == number + 1
    assert b"caf\xe9.jsonl" in os.listdir(os.fsencode(folder))
    for wrong in (f"{folder}/\ud800", 5, None, b"bytes"):
        with pytest.raises(ConfigError):
            trace.save(wrong)  # type: ignore[arg-type]


def test_numbers_of_numpy_become_plain(tmp_path: Path) -> None:
    """As in every other constructor; a row has to be written, and compared."""
    given: dict[str, Any] = {
        **dict.fromkeys(("timestamp", "ttft_s", "latency_s", "late_s"), np.float32(1.5)),
        **dict.fromkeys(("input_length", "text_length", "max_tokens"), np.int64(4)),
        "output_length": np.uint8(3),
        "itl_s": [0.5, np.float64(0.25), np.float16(2)],
        "hash_ids": [3, np.int32(7)],
    }
    sizes: dict[str, Any] = {"width": np.int64(9), "height": np.uint16(8), "tokens": np.int8(7)}
    row = TraceRow(**given, images=[TraceImage(**sizes)])
    plain = TraceRow(
        timestamp=1.5,
        ttft_s=1.5,
        latency_s=1.5,
        late_s=1.5,
        input_length=4,
        text_length=4,
        max_tokens=4,
        output_length=3,
        itl_s=[0.5, 0.25, 2.0],
        hash_ids=[3, 7],
        images=[TraceImage(width=9, height=8, tokens=7)],
    )
    assert row == plain
    assert msgspec.json.encode(row) == msgspec.json.encode(plain)
    assert TraceRow(**{**GOOD, "timestamp": np.int64(5)}).timestamp == 5
    Trace([row, plain]).save(tmp_path / "rows.jsonl")


def test_a_row_cannot_become_a_bad_one() -> None:
    row = TraceRow(**GOOD)
    with pytest.raises(AttributeError, match="immutable"):
        row.timestamp = math.nan  # type: ignore[misc]


@pytest.mark.parametrize("name", ["width", "height", "tokens"])
@pytest.mark.parametrize("value", [-1, 0.5, math.nan, True, 2**41])
def test_an_image_has_whole_sizes(name: str, value: Any) -> None:
    with pytest.raises(TraceError, match=f"an image's {name}"):
        TraceImage(**{name: value})


@pytest.mark.parametrize("rate", [1e-320, 5e-324])
def test_a_scale_beyond_all_times_is_refused(rate: float) -> None:
    with pytest.raises(TraceError, match="finite"):
        Trace([TraceRow(**GOOD), TraceRow(**{**GOOD, "timestamp": 1e9})]).scale(rate)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "timestamp": st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=3)),
            "input_length": st.one_of(st.integers(), st.floats(), st.booleans()),
            "output_length": st.one_of(st.integers(), st.floats()),
            "text_length": st.one_of(st.none(), st.integers(), st.floats()),
            "max_tokens": st.one_of(st.none(), st.integers(), st.binary(max_size=2)),
            "images": st.one_of(st.lists(st.none(), max_size=2), st.integers()),
            "hash_ids": st.one_of(st.lists(st.one_of(st.integers(), st.floats()), max_size=3), st.none()),
            "itl_s": st.one_of(st.lists(st.one_of(st.floats(), st.none()), max_size=3), st.text(max_size=2)),
            "ttft_s": st.one_of(st.none(), st.floats()),
        },
    )
)
def test_a_row_that_exists_is_valid(fields: dict[str, Any]) -> None:
    try:
        row = TraceRow(**{**GOOD, **fields})
    except TraceError:
        return
    assert 0 <= row.timestamp < math.inf
    lengths = [row.input_length, row.output_length, row.text_length or 0, row.max_tokens or 0]
    assert all(type(each) is int and 0 <= each <= 2**40 for each in (*lengths, *row.hash_ids))
    assert all(0 <= each < math.inf for each in (row.ttft_s or 0.0, *row.itl_s))
    assert row.text_tokens >= 0
