"""Checkpoints that are broken, or made to harm: a typed error; their code does not run."""

from __future__ import annotations

import json
import pickle
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trinity
from support.checkpoint_files import checkpoint
from trinity import commands
from trinity.errors import ConfigError, TrinityError, UnsupportedModel
from trinity.preprocess.checkpoint.config_file import count_tensors, read_config
from trinity.preprocess.checkpoint.model_files import MOST_CONFIG_BYTES
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model
from trinity.stages.proof.prove import prove

MOST_MEMORY = 1 << 30  # bytes that a refusal may cost


def copy(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), folder / "copy"))


def change(directory: Path, fields: dict[str, Any], name: str = "config.json") -> None:
    """Set fields by dotted path."""
    config = json.loads((directory / name).read_text())
    for place, value in fields.items():
        *above, last = place.split(".")
        inner = config
        for each in above:
            inner = inner[each]
        inner[last] = value
    (directory / name).write_text(json.dumps(config))


def load_everything(directory: Path) -> None:
    RequestProcessor(directory)
    load_model(directory, "EPD" if (directory / "preprocessor_config.json").exists() else "PD")


def refuse(directory: Path) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TrinityError) as raised:
        load_everything(directory)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_MEMORY
    return str(raised.value)


COUNTS = [-1, 0, 1.5, "many", True, 2**40, 10**400, {}, [-1]]


@pytest.mark.parametrize("value", COUNTS, ids=str)
@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_count_that_is_none(name: str, value: Any, tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    change(directory, {name: value})
    assert f"{name} is a whole number from 1" in refuse(directory)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 1_000_000},
        {"vocab_size": 1 << 30},
        {"hidden_size": 1 << 20},
        {"intermediate_size": 1 << 30},
        {"num_attention_heads": 7},
        {"num_key_value_heads": 3},
        {"head_dim": 1},
        {"rope_parameters": 5},
        {"hidden_act": "explode"},
        {"rms_norm_eps": "small"},
        {"architectures": ["Nope"], "model_type": "nope"},
        {"architectures": 5},
        {"dtype": "float33"},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_config_that_its_weights_do_not_have(fields: dict[str, Any], tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    change(directory, fields)
    refuse(directory)


@pytest.mark.parametrize("value", [1e9, 1_000_000_000, -5, "x", [1], True, 10**30], ids=str)
def test_a_token_of_images_that_is_none(value: Any, tmp_path: Path) -> None:
    directory = copy("llava", tmp_path)
    field = next(
        name for name in json.loads((directory / "config.json").read_text()) if name.startswith("image_token_i")
    )
    change(directory, {field: value})
    refuse(directory)


@pytest.mark.parametrize(
    "place", ["text_config.vocab_size", "vision_config.num_hidden_layers", "text_config.hidden_size"]
)
def test_counts_of_inner_configs(place: str, tmp_path: Path) -> None:
    directory = copy("llava", tmp_path)
    change(directory, {place: -1})
    assert place in refuse(directory)
    change(directory, {place: 1_000_000})
    refuse(directory)


TEXTS: dict[str, bytes] = {
    "brackets without end": b"[" * 1_000_000,
    "objects without end": b'{"a":' * 200_000,
    "no text": bytes(range(128, 256)),
    "a list": b"[1, 2]",
    "nothing": b"",
    "a number": b"5",
    "zeros": b"\0" * 4096,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"]
)
def test_a_file_that_is_no_object_of_json(name: str, text: bytes, tmp_path: Path) -> None:
    directory = copy("llava", tmp_path)
    assert (directory / name).exists()
    (directory / name).write_bytes(text)
    refuse(directory)


def test_a_config_of_any_size_is_not_read(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    with (directory / "config.json").open("ab") as file:
        file.truncate(MOST_CONFIG_BYTES + 1)
    assert "no config is" in refuse(directory)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "minicpmv", "auto_map": {"AutoConfig": "a.B"}}, "never run here.*MiniCPM-V 4.6"),
        ({"model_type": "ours", "auto_map": {"AutoConfig": "a.B"}}, "never run here.*transformers' own format"),
        ({"model_type": "ours"}, "does not know: 'ours'.*a later release may.*register_adapter"),
        ({"model_type": 5}, "does not know: 5"),
        ({"dtype": "float7"}, "cannot read .*float7.*mend it"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_what_transformers_does_not_read_is_refused_by_name(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    found = refuse(directory)
    assert re.search(said, found)
    assert "trust_remote_code=True" not in found
    if "auto_map" in fields:
        (directory / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        refuse(directory)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model", "name", "text"),
    [
        ("any-vipllava", "generation_config.json", "[]"),
        ("any-vipllava", "model.safetensors", "of no form"),
        ("llama", "generation_config.json", "[]"),
        ("llama", "model.safetensors", "of no form"),
        ("llama", "tokenizer_config.json", "[]"),
        ("llama", "config.json", '{"model_type": "vipllava", "quantization_config": {"quant_method": "nosuch"}}'),
    ],
)
def test_trinity_check_says_in_a_line_what_cannot_be_loaded(
    model: str, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy(model, tmp_path)
    (directory / name).write_text(text)
    assert commands.main(["check", str(directory)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("trinity check: ")
    assert found.err.count("\n") == 1


@pytest.mark.parametrize("model", ["llama", "llava", "any-vipllava"])
def test_an_adapter_beside_the_weights_is_refused(model: str, tmp_path: Path) -> None:
    """transformers adds it where peft is installed, and elsewhere says nothing."""
    directory = copy(model, tmp_path)
    (directory / "adapter_config.json").write_text("{}")
    for refused in (lambda: RequestProcessor(directory), lambda: load_model(directory, "P"), lambda: prove(directory)):
        with pytest.raises(UnsupportedModel, match=r"adapter \(LoRA\).*merge it"):
            refused()


@pytest.mark.parametrize("model", ["qwen2_vl", "any-lfm2_vl"])
def test_trinity_check_makes_no_memory_for_weights_that_no_file_has(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the proof of a type that nobody listed, as a pipeline has it run."""
    directory = copy(model, tmp_path)
    change(directory, {"text_config.intermediate_size": 1_000_000})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert commands.main(["check", str(directory)]) == 2
    found = capsys.readouterr()
    assert "weights, and its files have no room for them" in found.err
    assert found.err.count("\n") == 1
    if model.startswith("any-"):
        with pytest.raises(UnsupportedModel, match="its files have no room for them") as told:
            RequestProcessor(directory)
        assert "no verdict" not in str(told.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_MEMORY // 4


class Harm:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("given", ["hf://somebody/a-model", "s3:bucket/a-model", Path("hf://somebody/a-model")])
def test_an_address_in_place_of_a_directory_is_refused_by_its_scheme(given: str | Path) -> None:
    scheme = str(given).partition(":")[0]
    with pytest.raises(ConfigError, match=f"address of the scheme '{scheme}:', and nothing is downloaded; download"):
        load_model(given, "PD")
    with pytest.raises(ConfigError, match="'somebody/a-model' does not exist"):
        load_model("somebody/a-model", "PD")


def test_pickled_weights_run_no_code(tmp_path: Path) -> None:
    directory, harmed = copy("llama", tmp_path), tmp_path / "harmed"
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(harmed)))
    refuse(directory)
    assert not harmed.exists()


HEADERS: dict[str, bytes] = {
    "longer than the file": struct.pack("<Q", 1 << 62),
    "no header": b"",
    "half a length": b"\1\0\0",
    "no object": struct.pack("<Q", 2) + b"[]",
    "brackets without end": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a tensor beyond the file": struct.pack("<Q", 64)
    + b'{"a":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'.ljust(64),
    "a shape without end": struct.pack("<Q", 96)
    + b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'.ljust(96),
    "an unknown dtype": struct.pack("<Q", 64) + b'{"a":{"dtype":"X9","shape":[0],"data_offsets":[0,0]}}'.ljust(64),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_broken_file_of_weights(header: bytes, tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    (directory / "model.safetensors").write_bytes(header)
    refuse(directory)
    assert count_tensors(directory) <= 1


@pytest.mark.parametrize("index", [{}, {"weight_map": 5}, {"weight_map": {"a": "../../../etc/passwd"}}, []], ids=str)
def test_a_broken_index_of_weights(index: Any, tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(directory)


@settings(max_examples=30)  # each loads a model
@given(where=st.integers(0, 4000), what=st.binary(min_size=1, max_size=8))
@example(where=0, what=b"\xff" * 8)
def test_a_header_with_other_bytes_is_served_or_refused(
    tmp_path_factory: pytest.TempPathFactory, where: int, what: bytes
) -> None:
    directory = copy("llama", tmp_path_factory.mktemp("flipped"))
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(where)
        file.write(what)
    try:
        load_model(directory, "PD")
    except TrinityError:
        pass
    finally:
        shutil.rmtree(directory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_a_config_with_any_field_changed_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("changed")
    fields = json.loads((checkpoint("llava") / "config.json").read_text())
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(JSON)
    (directory / "config.json").write_text(json.dumps(fields))
    try:
        read_config(directory)
    except TrinityError:
        pass
    finally:
        shutil.rmtree(directory)


async def test_a_pipeline_says_it_at_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    (directory / "model.safetensors").write_bytes(HEADERS["no object"])
    for hosting in ("thread", "process"):
        pipe = trinity.Pipeline(directory, "PD", hosting=hosting)  # type: ignore[arg-type]
        with pytest.raises(TrinityError, match="is the checkpoint complete"):
            await pipe.start()
        await pipe.aclose()


def test_a_sound_checkpoint_is_read() -> None:
    for name in ("llama", "llava"):
        load_everything(checkpoint(name))
        assert count_tensors(checkpoint(name)) > 10


@pytest.mark.parametrize("value", [[[1]], 1.5, [1.5], ["x"], {"a": 1}, True], ids=str)
def test_an_end_of_sequence_that_is_no_token(value: Any, tmp_path: Path) -> None:
    directory = copy("llama", tmp_path)
    change(directory, {"eos_token_id": value}, "generation_config.json")
    assert "eos_token_id" in refuse(directory)


@pytest.mark.parametrize("device", ["cuda:99", "xyz", "meta", "mps", "cpu:7", "xla", ""])
def test_a_device_that_is_none(device: str) -> None:
    with pytest.raises(TrinityError, match="device"):
        load_model(checkpoint("llama"), "PD", device=device)


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(TrinityError, match="cannot be read"):
        trinity.Pipeline("x" * 5000)
