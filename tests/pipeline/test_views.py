"""What terminals and notebooks show of what a user holds; foreign texts are escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trinity
from support.emulated_pipelines import MODEL, POOLS, asked
from trinity.core.messages import PeerLoad
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.pipeline import instance_table
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.request import Output
from trinity.timeline import Timeline

HOSTILE = "<script>alert('x')</script> & more"


async def test_a_pipeline_says_what_it_serves_and_how() -> None:
    pipe = Pipeline(MODEL, "1EP1D", cache=CacheConfig(pools=POOLS))
    assert repr(pipe) == f"Pipeline({MODEL} on 1EP1D, new, 0 ended)"
    async with pipe:
        async with pipe.stream(asked()[0]) as tokens:
            assert repr(tokens) == f"Stream({tokens.request.request_id!r}: 0 tokens, in flight)"
            await tokens.wait_first()
            assert "running, 1 served now, 0 ended" in repr(pipe)
            assert pipe.streams == (tokens,)
            await tokens.collect()
        assert repr(tokens).endswith(": 12 tokens, length)")
        shown = pipe._repr_html_()
        assert "<td>EP0</td><td>encode, prefill</td>" in shown
        assert "<td>D0</td><td>decode</td>" in shown
        assert "<script" not in shown
    assert repr(pipe).endswith("closed, 1 ended)")
    assert repr(pipe.stream(asked()[0])).endswith(": 0 tokens, not begun)")


def test_a_checkpoint_is_shown_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert repr(Pipeline(tmp_path)).startswith(f"Pipeline({tmp_path.name} on 1EPD, new")


def test_instances_in_processes_show_their_state() -> None:
    instances = [Instance("E", "E0"), Instance("PD", "PD0")]
    object.__setattr__(instances[1], "name", HOSTILE)  # no user can give it; the page escapes it all the same
    loads = {"E0": PeerLoad("E0", free={"image": 1234}, predicted_s={"E": 0.0125})}
    health = {"E0": InstanceHealth("E0", "up", 0), HOSTILE: InstanceHealth(HOSTILE, "lost", 1, why="killed")}
    table = instance_table(instances, loads, health)
    assert table.header == ("instance", "stages", "process", "work ahead", "free blocks")
    assert table.rows[0] == ("E0", "encode", "up", "12.5 ms", "1,234 image")
    assert table.rows[1][:3] == (HOSTILE, "prefill, decode", "lost: killed")
    assert instance_table(instances, {}, {}).header == ("instance", "stages")


def test_an_output_is_shown_in_short() -> None:
    output = Output(
        request_id="r",
        text="a" * 100,
        token_ids=[1, 2, 3],
        finish_reason="length",
        prompt_tokens=20,
        media_tokens=16,
        ttft_s=0.0123,
        itl_s=[0.001, 0.003],
        route=["E0", "PD0"],
    )
    facts = "finish length, tokens 3, prompt 20 (16 visual), TTFT 12.3 ms, TPOT 2.0 ms, route E0 → PD0"
    assert repr(output) == f"Output('r': '{'a' * 60}…', {facts})"
    assert repr(Output(request_id="r")) == "Output('r': '', tokens 0, prompt 0)"
    hostile = Output(request_id=HOSTILE, text=HOSTILE)._repr_html_()
    assert "<script" not in hostile
    assert hostile.count("&lt;script&gt;") == 2


def test_a_timeline_is_shown_by_lane() -> None:
    timeline = Timeline()
    assert repr(timeline) == "Timeline(0 slices of 0 instances over 0.000 s)"
    timeline.add("E0", "vision", "encode", 10.0, 0.5)
    timeline.add("E0", "vision", "encode", 11.0, 0.25)
    timeline.add(HOSTILE, "language", "prefill", 10.5, 2.0)
    assert repr(timeline) == "Timeline(3 slices of 2 instances over 2.500 s)"
    shown = timeline._repr_html_()
    assert "<td>E0</td><td>vision</td><td>2</td><td>0.750</td>" in shown
    assert "<script" not in shown


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (trinity.Connector({"image": "shm", "kv": "inproc"}), "Connector(image by shm, kv by inproc, state by inproc)"),
        (
            trinity.HybridPlanner("qwen2-vl-7b", trinity.SLO(2.0, 0.08), device={"H100": 2, "L40S": 1}),
            "HybridPlanner(qwen2-vl-7b on up to 3 of H100 and L40S, objective goodput)",
        ),
        (trinity.SyncPipeline(MODEL), f"SyncPipeline({MODEL} on 1EPD, new, 0 ended)"),
    ],
)
def test_others_say_what_they_are(shown: Any, said: str) -> None:
    assert repr(shown) == said
