"""Hybrids in virtual time: requests hold blocks of states, which migrate; sizes are those that a loaded model has."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from support.hybrid_models import build_hybrid
from support.simulations import row, simulator
from trinity.costs.layer_parts import StateShape
from trinity.costs.model_config import from_config, read_model_shape
from trinity.errors import ConfigError
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import Trace

STATES = StateShape(layers=1, nbytes=1 << 20)


def hybrid(devices: int, backend: str = "auto") -> Simulator:
    made = simulator(devices, backend=backend)
    made.model = replace(made.model, states=STATES)
    return made


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_sizes_are_those_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    from trinity.stages.models import load_model

    folder = build_hybrid(tmp_path / name, name)
    shape, states = read_model_shape(folder), load_model(folder, "PD", dtype="float32").states
    assert states is not None
    assert shape.states is not None
    assert shape.kv_layers == len(states.kv_layers)
    assert 0 <= states.size - shape.state_bytes < 64 * len(states.pieces), "but for what aligns each"


def test_requests_hold_states_and_states_move() -> None:
    rows = [row(0.0, 64, 3), row(0.0, 64, 3)]
    replay = hybrid(2).replay(Trace(rows), "1P1D")
    assert replay.backend == "python"
    assert replay.moved_bytes["state"] == 2 * STATES.nbytes
    assert (replay.peak_blocks["P0"]["state"], replay.peak_blocks["D0"]["state"]) == (2, 2)
    plain = simulator(2).replay(Trace(rows), "1P1D")
    assert "state" not in plain.moved_bytes
    assert plain.moved_bytes["kv"] > replay.moved_bytes["kv"], "one layer has no keys and values"


def test_a_request_waits_for_a_block_of_states() -> None:
    one = hybrid(1)
    one._known["PD", 0] = (one._sizes_of_roles("PD", 0)[0], {"kv": 64, "state": 1})
    (first, second) = one.replay(Trace([row(0.0, 64, 3), row(0.0, 64, 3)]), "PD").outcomes
    assert (second.ttft_s or 0.0) > (first.ttft_s or 0.0) + sum(first.itl_s) > 0


def test_the_compiled_engine_leaves_them_to_the_cores() -> None:
    assert hybrid(1).why_python("PD") == "pools of state blocks"
    assert not hybrid(1).screens("PD")
    with pytest.raises(ConfigError, match="pools of state blocks"):
        hybrid(1, "compiled").replay(Trace([row(0.0, 64, 3)]), "PD")


def test_configs() -> None:
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 8,
        "intermediate_size": 128,
        "vocab_size": 100,
        "full_attention_interval": 4,
        **dict.fromkeys(("linear_num_key_heads", "linear_key_head_dim"), 2),
        **dict.fromkeys(("linear_num_value_heads", "linear_value_head_dim"), 4),
    }
    found = from_config(fields)
    assert found.states == StateShape(layers=6, nbytes=6 * ((2 * 4 + 16) * 4 * 2 + 4 * 2 * 4 * 4))
    assert found.kv_layers == 2
    others = {**fields, "layer_types": ["mamba"] * 7 + ["full_attention"]}
    assert from_config(others).states is None, "of a kind whose sizes nobody wrote down here"
    with pytest.raises(ConfigError, match="layer_types"):
        from_config({**fields, "layer_types": 7})
    with pytest.raises(ConfigError, match="linear_key_head_dim"):
        from_config({**fields, "linear_key_head_dim": "wide"})
