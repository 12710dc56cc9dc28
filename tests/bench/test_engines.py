"""What runs beside the engines: the wire, keys renamed, images behind ids; and real engines, exact in one run."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoint_files import checkpoint
from support.fake_engine import Fake
from trinity.bench import measure
from trinity.bench.engines import serve_trinity, wire
from trinity.bench.engines.serve_openvino import device_properties
from trinity.bench.engines.serve_transformers import FeatureEmbedding, TransformersModel
from trinity.bench.engines.vision_keys import rename_vision_keys
from trinity.bench.load import CheckpointRequests, burst_row
from trinity.bench.servers import BenchRequest, EngineSpec
from trinity.errors import ConfigError


def settings(**given: Any) -> dict[str, Any]:
    own = {"checkpoint": str(checkpoint("llava")), "pipeline": given.pop("options", {})}
    return {
        "placement": "EPD",
        "dtype": "float32",
        "threads": 1,
        "tokens": 64,
        "media": 1,
        "caches": False,
        **own,
        **given,
    }


def test_trinity_is_set_up_as_a_user_would() -> None:
    one = serve_trinity.make_pipeline(settings(threads=2, options={"depth": 2}))
    assert [(each.roles, each.threads, each.depth, each.image_cache) for each in one.instances] == [
        ("EPD", 2, 2, False)
    ]
    assert one.hosting == "thread"
    two = serve_trinity.make_pipeline(settings(placement="EP+D", options={"threads_of": {"EP": 2}}))
    assert [(each.name, each.threads) for each in two.instances] == [("EP0", 2), ("D0", 1)]
    assert two.hosting == "process"
    with pytest.raises(ConfigError, match="no keyword 'unheard'"):
        serve_trinity.make_pipeline(settings(options={"unheard": 1}))


@pytest.mark.filterwarnings("ignore::trinity.errors.TrinityWarning")
async def test_under_an_slo_budgets_are_searched_and_not_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path))
    async with serve_trinity.make_pipeline(settings(tokens=3, options={"slo": [9.0, 5.0], "policy": "time"})) as pipe:
        (host,) = pipe.hosts.values()
        rules = host.loaded.settings.rules
    assert (rules.policy, rules.limit_s) == ("time", 4.9)
    assert rules.token_budget > 3
    assert rules.cost is not None
    async with serve_trinity.make_pipeline(settings(tokens=3)) as pipe:
        (host,) = pipe.hosts.values()
        assert (host.loaded.settings.rules.policy, host.loaded.settings.rules.token_budget) == ("alg1", 3)


def test_prompts_lose_all_but_one_placeholder_of_each_image() -> None:
    request = {"ids": [1, 9, 9, 9, 2, 3, 9, 9, 4], "spans": [(1, 3), (6, 2)]}
    assert wire.collapse_placeholders(request) == [1, 9, 2, 3, 9, 4]
    assert wire.collapse_placeholders({"ids": [1, 2], "spans": []}) == [1, 2]


def test_fresh_tokens_are_those_not_yet_told() -> None:
    streams: dict[int, int] = {}
    told = [
        wire.take_new_tokens(streams, number, tokens)
        for number, tokens in ((1, [5]), (1, [5, 6, 7]), (2, [8]), (1, [5, 6, 7]))
    ]
    assert told == [[5], [6, 7], [8], []]


def test_an_engine_is_stepped_until_the_client_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    end, engine = wire.ServerWire(theirs.detach()), Fake({"options": {}, "tokens": 1, "dtype": "float32"})
    serving = threading.Thread(target=wire.serve_engine, args=(engine, end))
    request = {"id": 3, "text": "", "ids": [1, 2], "spans": [], "images": [], "tokens": 2}
    with ours, ours.makefile("rb") as lines:
        serving.start()
        for each in ({**request, "id": 4, "text": "refuse"}, request):
            ours.sendall(json.dumps(each).encode() + b"\n")
        said = [json.loads(next(lines)) for _ in range(4)]
        ours.shutdown(socket.SHUT_RDWR)
        serving.join(120)
    assert not serving.is_alive()
    end.close()
    assert said[0]["engine"] == "fake"
    assert set(said[0]["omp"]) == {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"}
    out = [each for line in said[1:] for each in line["out"]]
    assert out == [[4, [], "error: ValueError: it is refused"], [3, [3], ""], [3, [4], "length"]]


def test_the_vision_tower_gets_its_older_names_and_keeps_its_weights(tmp_path: Path) -> None:
    source = tmp_path / "new"
    source.mkdir()
    weights = {"vision_tower.embeddings.x": torch.arange(5.0), "language_model.y": torch.ones(2, 2)}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    found = rename_vision_keys(source, tmp_path / "old")
    loaded = load_file(found / "model.safetensors")
    assert set(loaded) == {"vision_tower.vision_model.embeddings.x", "language_model.y"}
    assert torch.equal(loaded["vision_tower.vision_model.embeddings.x"], weights["vision_tower.embeddings.x"])
    (source / "model.safetensors").unlink()
    assert rename_vision_keys(source, tmp_path / "old") == found  # written once
    save_file(loaded, source / "model.safetensors")
    assert set(load_file(rename_vision_keys(source, tmp_path / "again") / "model.safetensors")) == set(loaded)


def test_features_stand_behind_ids_beyond_the_vocabulary() -> None:
    words = torch.nn.Embedding(4, 2)
    rows = FeatureEmbedding(words, 4)
    first, second = rows.put(torch.ones(2, 2)), rows.put(torch.full((1, 2), 7.0))
    assert not set(first) & set(second)
    found = rows(torch.tensor([[1, *second, *first]]))
    assert torch.equal(found[0, 0], words.weight[1])
    assert found[0, 1:].tolist() == [[7, 7], [1, 1], [1, 1]]
    rows.give_back(first)
    assert set(rows.put(torch.zeros(2, 2))) == set(first)  # room is used again
    assert len(rows.rows) == 3


def test_openvino_has_the_kv_cache_in_the_precision_of_the_run() -> None:
    one = device_properties({"dtype": "float32", "threads": 1})
    assert one == {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    assert "INFERENCE_NUM_THREADS" not in device_properties({"dtype": "bfloat16", "threads": 1})
    assert device_properties({"dtype": "bfloat16", "threads": 2})["INFERENCE_NUM_THREADS"] == 2


def test_the_language_model_alone_shares_its_weights() -> None:
    model = TransformersModel({"checkpoint": str(checkpoint("llava")), "dtype": "float32"})
    alone = model.language()
    assert alone.model is model.whole.model.language_model
    assert not [name for name, each in alone.named_parameters() if each.is_meta]
    with CheckpointRequests(checkpoint("llava")) as make:
        made = make(burst_row(1, 8, 2), 0)
    request: dict[str, Any] = {"images": made.images}
    assert model.features(request).shape == (made.spans[0][1], model.whole.config.text_config.hidden_size)
    assert model.pixels({"images": []}) == {}


def burst_of(name: str) -> list[BenchRequest]:
    with CheckpointRequests(checkpoint(name), "engines") as make:
        return [make(burst_row(int(make.takes_images), 12 + 5 * number, 6), number) for number in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "llama"])
async def test_engines_have_the_tokens_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    requests = await asyncio.to_thread(burst_of, name)  # its processor takes a second to load
    engines = [
        EngineSpec(tokens=32),
        EngineSpec(placement="E+PD" if name == "llava" else "P+D"),
        EngineSpec(kind="generate_batch"),
    ]
    found = await measure.count_exact(engines, checkpoint(name), requests)
    assert found == {each.name: 3 for each in engines}
