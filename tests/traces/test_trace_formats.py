"""Other systems' traces: units, what is imputed, bad rows by line, formats recognised or named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity import traces
from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.traces.trace import Trace

# A few rows of each kind, in the form in which each is published.
SERVEGEN = (
    '{"timestamp":0,"text_tokens":75,"image_tokens":[252],"output_length":180,"client":7}\n'
    '{"timestamp":250,"text_tokens":50,"image_tokens":[4,1222],"output_length":19,"client":31}\n'
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
)
MOONCAKE_CSV = "timestamp_ms,input_length,output_length\n0,6758,500\n3000,7322,490\n"
AZURE_LLM = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_LMM = (
    "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
    "2024-10-15 00:00:00.5000000,2,1500,80\n"
    "2024-10-15 00:00:02+00:00,0,40,7\n"
    "2024-10-15 00:00:03.25,9,900,12\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,API log\n"
)
GUIDELLM = (
    '{"timestamp": 100.5, "input_length": 40, "output_length": 8}\n'
    '{"timestamp": 102.0, "input_length": 50, "output_length": 9}\n'
)
OWN = '{"timestamp":1.5,"input_length":600,"output_length":3,"images":[{"width":640,"height":480,"tokens":576}]}\n'
RECOGNISED = {
    "servegen": SERVEGEN,
    "mooncake": MOONCAKE,
    "mooncake-csv": MOONCAKE_CSV,
    "azure-llm": AZURE_LLM,
    "azure-lmm": AZURE_LMM,
    "burstgpt": BURSTGPT,
    "trinity": OWN,
}


def read(tmp_path: Path, content: str, **options: Any) -> Trace:
    path = tmp_path / "trace.txt"
    path.write_text(content, encoding="utf-8")
    return traces.read_trace(path, **options)


def figures(trace: Trace) -> list[tuple[float, int, list[int | None], int]]:
    """(arrival in ms, text tokens, tokens of its images, output tokens) of each row."""
    return [
        (row.timestamp, row.text_tokens, [image.tokens for image in row.images], row.output_length) for row in trace
    ]


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_format_is_recognised_by_its_first_row_gzipped_or_not(tmp_path: Path, name: str) -> None:
    plain = read(tmp_path, RECOGNISED[name])
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(RECOGNISED[name].encode()))
    assert plain.report is not None
    assert plain.report.format == name
    assert list(traces.read_trace(packed)) == list(plain) == list(read(tmp_path, RECOGNISED[name], format=name))


def test_every_format_is_tested_and_says_its_units() -> None:
    assert {*RECOGNISED, "guidellm"} == set(traces.FORMATS)
    assert all(format.units for format in traces.FORMATS.values())


def test_servegen(tmp_path: Path) -> None:
    trace = read(tmp_path, SERVEGEN)
    assert figures(trace) == [(0, 75, [252], 180), (250, 50, [4, 1222], 19)]
    assert [row.input_length for row in trace] == [327, 1276]
    assert [row.session for row in trace] == ["client-7", "client-31"]


@pytest.mark.parametrize("content", [MOONCAKE, MOONCAKE_CSV])
def test_mooncake_is_text_in_ms(tmp_path: Path, content: str) -> None:
    trace = read(tmp_path, content)
    assert figures(trace) == [(0, 6758, [], 500), (3000, 7322, [], 490)]
    assert trace.report is not None
    assert set(trace.report.imputed) == {"text_length", "images"}


def test_mooncakes_prefix_blocks_are_kept(tmp_path: Path) -> None:
    assert [row.hash_ids for row in read(tmp_path, MOONCAKE)] == [[0, 1, 2], [0, 14]]


def test_azures_dates_become_ms_from_the_first_arrival(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE_LLM)
    assert [row.timestamp for row in trace] == pytest.approx([0, 4314.579], abs=1e-3)
    assert [row.text_tokens for row in trace] == [374, 396]


def test_azures_images_have_imputed_tokens_and_never_more_than_the_context(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE_LMM, image_tokens=600)
    assert figures(trace) == [(0, 300, [600, 600], 80), (1500, 40, [], 7), (2750, 0, [100] * 9, 12)]
    assert trace.report is not None
    assert trace.report.imputed["images.tokens"].startswith("600,")
    assert "600" in str(trace.report)
    assert figures(read(tmp_path, AZURE_LMM))[0] == (0, 348, [576, 576], 80)


def test_burstgpt_is_in_seconds(tmp_path: Path) -> None:
    assert figures(read(tmp_path, BURSTGPT)) == [(5000, 472, [], 18), (45000, 1087, [], 230)]


def test_a_request_of_burstgpt_that_failed_is_a_bad_row(tmp_path: Path) -> None:
    content = BURSTGPT + "50,GPT-4,10,0,10,API log\n"
    with pytest.raises(TraceError, match="line 4: no response tokens"):
        read(tmp_path, content)
    assert read(tmp_path, content, on_error="skip").skipped == 1


def test_guidellms_rows_are_in_seconds_and_must_be_named(tmp_path: Path) -> None:
    assert figures(read(tmp_path, GUIDELLM, format="guidellm")) == [(0, 40, [], 8), (1500, 50, [], 9)]
    unnamed = read(tmp_path, GUIDELLM)
    assert unnamed.report is not None
    assert unnamed.report.format == "mooncake"


def test_rows_out_of_order_are_ordered_and_counted(tmp_path: Path) -> None:
    first, second = SERVEGEN.splitlines()
    trace = read(tmp_path, f"{second}\n{first}\n{second}\n")
    assert [row.timestamp for row in trace] == [0, 250, 250]
    assert trace.report is not None
    assert trace.report.unordered == 1
    assert "1 rows out of order" in str(trace.report)


BAD = [
    '{"timestamp":-1,"text_tokens":5,"image_tokens":[],"output_length":1}',
    '{"timestamp":0,"text_tokens":-5,"image_tokens":[],"output_length":1}',
    '{"timestamp":0,"text_tokens":5,"image_tokens":[-1],"output_length":1}',
    '{"timestamp":0,"text_tokens":5,"image_tokens":7,"output_length":1}',
    '{"timestamp":0,"text_tokens":5,"image_tokens":[],"output_length":0}',
    '{"timestamp":NaN,"text_tokens":5,"image_tokens":[],"output_length":1}',
    '{"timestamp":"nan","text_tokens":5,"image_tokens":[],"output_length":1}',
    '{"timestamp":"inf","text_tokens":5,"image_tokens":[],"output_length":1}',
    '{"text_tokens":5,"image_tokens":[],"output_length":1}',
    '{"timestamp":0,',
    "[]",
    "\udcff",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_refused_by_its_line_or_skipped_and_counted(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes((SERVEGEN + "\n" + bad + "\n" + SERVEGEN).encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError, match=r"^line 4: ") as caught:
        traces.read_trace(path)
    assert caught.value.line == 4
    trace = traces.read_trace(path, on_error="skip")
    assert trace.report is not None
    assert (len(trace), trace.skipped, trace.report.skipped) == (4, 1, 1)
    assert trace.report.problems[0].startswith("line 4: ")
    assert "1 bad rows skipped, such as line 4" in str(trace.report)


@pytest.mark.parametrize("cells", ["0,1", "0,1,2,3", "x,1,2", "nan,1,2", "-1,1,2", "0,1.5,2", '"0,1,2'])
def test_a_bad_row_of_a_table(tmp_path: Path, cells: str) -> None:
    with pytest.raises(TraceError, match="line 4: "):
        read(tmp_path, MOONCAKE_CSV + cells)
    assert len(read(tmp_path, MOONCAKE_CSV + cells, on_error="skip")) == 2


@pytest.mark.parametrize("time", ["yesterday", "2023-13-16 18:15:46.1", "2023-11-16 18:15:46.x", ""])
def test_a_bad_date(tmp_path: Path, time: str) -> None:
    with pytest.raises(TraceError, match=r"line 4: .* is no time"):
        read(tmp_path, f"{AZURE_LLM}{time},1,2\n")


@pytest.mark.parametrize(
    "content", ["", "\n\n", MOONCAKE_CSV.splitlines()[0], MOONCAKE_CSV.splitlines()[0] + "\nx,y,z"]
)
def test_a_file_without_a_good_row_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match=r"empty|no good row"):
        read(tmp_path, content, on_error="skip")


@pytest.mark.parametrize("content", ["prompt,answer\na,b\n", '{"prompt": "a"}\n', "\x00\x01"])
def test_an_unknown_format_is_an_error_that_names_those_known(tmp_path: Path, content: str) -> None:
    with pytest.raises(TraceError, match="guidellm"):
        read(tmp_path, content)


def test_options_without_meaning_are_refused(tmp_path: Path) -> None:
    wrong: Any = "ignore"
    with pytest.raises(UnknownName, match="raise, skip"):
        read(tmp_path, SERVEGEN, on_error=wrong)
    with pytest.raises(UnknownName, match="servegen"):
        read(tmp_path, SERVEGEN, format="sharegpt")
    with pytest.raises(ConfigError, match="image_tokens"):
        read(tmp_path, AZURE_LMM, image_tokens=0)
    with pytest.raises(TraceError, match="columns missing for format burstgpt: Request tokens"):
        read(tmp_path, MOONCAKE_CSV, format="burstgpt")


def test_a_file_that_is_cut_off_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(SERVEGEN.encode() * 50)
    for damaged in (whole[:-9], whole[:20], b"\x1f\x8b" + b"x" * 30):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match="cut off or damaged"):
            traces.read_trace(path)
    with pytest.raises(TraceError, match="cannot read"):
        traces.read_trace(tmp_path / "none")


def test_the_shipped_hour_is_the_one_that_its_origin_describes() -> None:
    trace = traces.read_shipped("servegen-image-1h")
    found = trace.statistics()
    assert found.requests == 36_856
    assert found.duration_s == pytest.approx(3600, abs=1)
    assert found.image_tokens is not None
    assert found.visual_tokens is not None
    assert found.output_tokens is not None
    assert found.visual_tokens["max"] == 24_109
    assert found.output_tokens["p95"] == 355
    assert trace.report is not None
    assert trace.report.format == "servegen"
    with pytest.raises(UnknownName, match="servegen-image-1h"):
        traces.read_shipped("servegen")


def test_the_shipped_day_is_the_one_that_its_origin_describes() -> None:
    trace = traces.read_shipped("servegen-image-24h")
    found = trace.statistics()
    assert found.requests == 48_963
    assert found.duration_s == pytest.approx(86_400, abs=5)
    assert found.output_tokens is not None
    assert found.output_tokens["max"] == 2_000
    hours = [len(trace.window(3600 * hour, 3600 * hour + 3600)) for hour in range(24)]
    assert (min(hours), max(hours)) == (1247, 2769)  # its drift


def test_the_shipped_data_come_with_origin_and_licence() -> None:
    folder = Path(traces.__file__).parent / "data"
    origin = (folder / "ORIGIN.md").read_text(encoding="utf-8")
    for file, _ in traces.SHIPPED_TRACES.values():
        assert file in origin
    assert "f891d11" in origin
    assert "Apache License" in (folder / "LICENSE.Apache-2.0").read_text(encoding="utf-8")


counts = st.integers(0, 5000)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), counts, st.lists(counts, max_size=4), st.integers(1, 2000)),
        min_size=1,
        max_size=20,
    )
)
def test_what_servegen_records_survives_our_own_file(rows: list[tuple[int, int, list[int], int]]) -> None:
    import tempfile

    fields = ("timestamp", "text_tokens", "image_tokens", "output_length")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
        trace = traces.read_trace(path)
        trace.save(Path(folder) / "own.jsonl.gz")
        assert list(Trace.load(Path(folder) / "own.jsonl.gz")) == list(trace)
    assert sorted(figures(trace)) == sorted((float(at), text, list(images), out) for at, text, images, out in rows)
