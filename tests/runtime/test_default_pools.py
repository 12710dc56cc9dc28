"""Default pools of instances that share a GPU: a stand-in for its memory, and weights of LLaVA-1.5-7B's shape."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace as replace_setup

from support.checkpoint_files import checkpoint
from trinity.config_classes import unpack_config
from trinity.connector import Connector
from trinity.costs.device_memory import CONTEXT_BYTES, POOL_SHARE
from trinity.errors import ConfigError
from trinity.instance import Instance, name_instances
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.memory.cache_config import CacheConfig
from trinity.memory.devices import ENCODE_BYTES
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.remote.channel.wire import Setup, decode, encode
from trinity.remote.instance_setup import load_instance, read_instance
from trinity.remote.supervision.process_config import make_setups
from trinity.runtime import host, loader
from trinity.runtime.loader import ServingConfig, ServingOptions, load_instances
from trinity.runtime.pool_shapes import block_shapes
from trinity.stages.models import loader as weights
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.loader import count_weight_bytes, load_model
from trinity.stages.models.registry import find_adapter
from trinity.testing.checkpoints_llava import llava_7b

GIB = 1 << 30
TOTAL = 139 * GIB


@cache
def count_once(directory: Path, letters: str) -> int:
    return count_weight_bytes(directory, letters, dtype="bfloat16")


class Weighed(LoadedModel):
    """A model with the config of its checkpoint and the bytes of its weights, but no weights."""

    @property
    def weight_bytes(self) -> int:
        return count_once(self.directory, self.letters)


@dataclass
class Gpu:
    """Stand-in for the GPUs of a machine: ``used`` bytes of ``total`` on each.

    ``made`` has the bytes of each instance's pools, ``pools`` their blocks.
    """

    used: dict[str, int]
    made: dict[str, int]
    total: int = TOTAL
    pools: dict[str, dict[str, int]] = field(default_factory=dict)

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return self.total - self.used.get(device, 0), self.total

    def build(self, spec: Instance, model: LoadedModel, pools: Any, cache: Any, *_: Any) -> Any:
        shapes = block_shapes(spec.roles, model, cache)
        self.pools[spec.name] = dict(pools)
        self.made[spec.name] = sum(shape.block_bytes * pools[kind] for kind, shape in shapes.items())
        return SimpleNamespace(spec=spec, model=model, settings=Empty())


@dataclass(frozen=True)
class Empty:
    """Settings that nobody reads."""

    rules: Any = None
    transfers: Any = None
    lease_s: float = 0.0
    epoch: int = 0
    host: str = ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, recipe = tmp_path_factory.mktemp("llava-7b"), llava_7b()
    recipe.config.architectures = [recipe.model_class.__name__]
    recipe.config.save_pretrained(folder)
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu({}, {})

    def get_model(config: ServingConfig, spec: Instance) -> Weighed:
        assert isinstance(config.model, Path)
        adapter, _ = find_adapter(read_config(config.model))
        return Weighed(config.model, spec.roles, None, adapter, torch.bfloat16, torch.device("cuda"), "")

    monkeypatch.setattr(loader, "_count_weights", lambda config, roles, device: count_once(config.model, roles))
    monkeypatch.setattr(torch.cuda, "mem_get_info", made.mem_get_info)
    monkeypatch.setattr(loader, "_get_model", get_model)
    monkeypatch.setattr(loader, "build_instance", made.build)
    return made


def setups(model: Path, instances: Sequence[Instance], cache: CacheConfig | None = None) -> list[Setup]:
    config = ServingConfig(model, dtype="bfloat16", device="cuda", cache=cache or CacheConfig())
    sent = make_setups(name_instances(instances), config, Connector("shm"), "round_robin")
    return [message for each in sent if isinstance(message := decode(encode(each)), Setup)]


def load_each(gpu: Gpu, asked: Sequence[Setup], model: Path) -> int:
    """Have each process size its pools when no other has loaded yet; returns the bytes that all take in the end."""
    taken = 0
    for setup in asked:
        weights = count_once(model, setup.roles) + CONTEXT_BYTES
        gpu.used = {"cuda": weights}
        load_instance(setup)
        taken += weights + gpu.made[setup.name]
    return taken


@pytest.mark.parametrize(
    "placement", [("E", "P", "D"), ("EPD", "EPD"), ("EP", "D", "D"), ("E", "E", "PD"), ("P",) * 3 + ("D",) * 3]
)
def test_processes_on_one_gpu_fit_into_it(gpu: Gpu, model: Path, placement: tuple[str, ...]) -> None:
    taken = load_each(gpu, setups(model, [Instance(roles) for roles in placement]), model)
    assert 0.75 * TOTAL < taken <= TOTAL


def test_what_encoders_work_in_is_left_to_them(gpu: Gpu, model: Path) -> None:
    """Once for each that encodes, in threads or processes; the pools then share what else is free."""
    config = ServingConfig(model, dtype="bfloat16", device="cuda")
    gpu.used = {"cuda": TOTAL - 22 * GIB}
    load_instances(config, name_instances([Instance("EP"), Instance("EP"), Instance("D")]), None)
    assert sum(gpu.made.values()) == pytest.approx(POOL_SHARE * (22 * GIB - 2 * ENCODE_BYTES), rel=1e-2)
    taken = load_each(gpu, setups(model, [Instance("E"), Instance("E"), Instance("PD")]), model)
    weights = taken - sum(gpu.made[name] for name in ("E0", "E1", "PD0"))
    pools = POOL_SHARE * (TOTAL - weights - 2 * ENCODE_BYTES)
    assert taken - weights == pytest.approx(pools, rel=1e-2)


def test_one_that_starts_again_takes_what_it_had(gpu: Gpu, model: Path) -> None:
    asked = setups(model, [Instance("E"), Instance("P"), Instance("D")])
    taken = load_each(gpu, asked, model)
    first = dict(gpu.made)
    for setup in asked:
        gpu.used = {"cuda": taken - first[setup.name]}  # the others have all of theirs, this one has its weights
        load_instance(setup)
    assert gpu.made == first


def test_what_another_program_holds_is_left_to_it(gpu: Gpu, model: Path) -> None:
    first, *_ = setups(model, [Instance("D"), Instance("E")])
    gpu.used = {"cuda": TOTAL - 10 * GIB}
    load_instance(first)
    assert gpu.made["D0"] <= 8 * GIB


def test_pools_and_memory_that_are_set_are_taken_off(gpu: Gpu, model: Path) -> None:
    alone = setups(model, [Instance("PD", "last")])
    load_each(gpu, alone, model)
    most = gpu.made["last"]
    fixed = [Instance("E", pools={"image": 2048}), Instance("D", memory_bytes=60 * GIB), Instance("PD", "last")]
    load_each(gpu, setups(model, fixed), model)
    assert gpu.made["last"] < min(most, TOTAL - 60 * GIB - 2048 * 576 * 8192 - 14 * GIB)


def test_processes_elsewhere_take_nothing(gpu: Gpu, model: Path) -> None:
    def shares(*where: dict[str, Any]) -> int:
        others = [Instance("PD", **each) for each in where]
        first, *_ = setups(model, [Instance("PD", "first"), *others])
        return len(first.beside)

    assert shares({"device": "cuda:0"}, {"device": "cuda:1"}) == 1
    assert shares({"address": "tcp:127.0.0.1:7000"}, {"address": "unix:/tmp/one"}) == 2
    table = Path("/proc/net/fib_trie").read_text() if Path("/proc/net/fib_trie").exists() else ""
    own = set(re.findall(r"-- ([\d.]+)\n\s+/32 host LOCAL", table))
    assert shares(*({"address": f"tcp:{each}:7000"} for each in own)) == len(own), "an interface of this machine"
    named = ({"address": f"tcp:{each}:7000"} for each in ("[::1]", "localhost", socket.gethostname()))
    assert shares(*named) == 3
    others = ("203.0.113.77", "[2001:db8::5]", "no.host.invalid")
    assert shares(*({"address": f"tcp:{each}:7000"} for each in others)) == 0
    assert shares({"address": "tcp:other:7000"}, {"address": "tcp:localhost:7000"}) == 1


def test_the_memory_of_an_instance_goes_before_the_pipelines_pools(gpu: Gpu, model: Path) -> None:
    """As in threads; a process was sent both, and took the pools."""
    (setup,) = setups(model, [Instance("PD", memory_bytes=20 * GIB)], CacheConfig(pools={"image": 1, "kv": 1}))
    tenant = loader.describe_tenant(read_instance(setup), unpack_config(ServingOptions, setup.serving).cache)
    assert (tenant.pools, tenant.memory_bytes) == (None, 20 * GIB)


# ------------------------------------------------------------ published models on one card


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the configs of models, as their text and vision parts are published."""
    from transformers import Qwen2_5_VLConfig

    folders = {}
    for size, width, ffn, layers, heads, kv_heads, tied in (
        ("7b", 3584, 18_944, 28, 28, 4, False),
        ("3b", 2048, 11_008, 36, 16, 2, True),
    ):
        text: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "vocab_size": 152_064,
        }
        text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
        vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        config = Qwen2_5_VLConfig(text_config=text, vision_config={**vision, "out_hidden_size": width})
        config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
        folders[f"qwen2.5-vl-{size}"] = tmp_path_factory.mktemp(size)
        config.save_pretrained(folders[f"qwen2.5-vl-{size}"])
    return folders


@pytest.mark.parametrize(
    ("name", "roles", "card_gib", "least_gib", "least_tokens"),
    [
        ("qwen2.5-vl-7b", "EPD", 139, 96, 1_500_000),
        ("qwen2.5-vl-7b", "D", 139, 98, 1_800_000),
        ("qwen2.5-vl-3b", "EPD", 139, 103, 2_700_000),
        ("qwen2.5-vl-3b", "D", 79, 56, 1_600_000),
        ("llava-1.5-7b", "EPD", 139, 98, 170_000),
        ("llava-1.5-7b", "PD", 79, 51, 90_000),
    ],
)
def test_default_pools_take_what_a_card_has(
    gpu: Gpu,
    model: Path,
    published: dict[str, Path],
    name: str,
    roles: str,
    card_gib: int,
    least_gib: int,
    least_tokens: int,
) -> None:
    """Decision 0053 gives four fifths of what weights and encoding leave; 8,192 blocks were 7 GiB of a 7B's 99."""
    folder = published.get(name, model)
    weights = count_once(folder, roles)
    gpu.total, gpu.used = card_gib * GIB, {"cuda": weights}
    load_instances(ServingConfig(folder, dtype="bfloat16", device="cuda"), [Instance(roles, "only")], None)
    free = gpu.total - weights - ENCODE_BYTES * ("E" in roles)
    assert gpu.made["only"] == pytest.approx(POOL_SHARE * free, rel=1e-3)
    assert gpu.made["only"] >= least_gib * GIB
    assert gpu.pools["only"]["kv"] * CacheConfig().kv_block_size >= least_tokens


def test_default_pools_on_a_cpu_have_an_upper_bound(gpu: Gpu, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a tiny model are small: a GiB of them would be a million."""
    monkeypatch.setattr(loader, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(loader, "_block_bytes", lambda config, model, roles: {"image": 64, "kv": 64})
    load_instances(ServingConfig(model, dtype="bfloat16", device="cpu"), [Instance("PD", "only")], None)
    assert gpu.pools["only"] == {"image": loader.DEFAULT_BLOCKS, "kv": loader.DEFAULT_BLOCKS}


# ------------------------------------------------------------ weights that processes share


def load_sharing(gpu: Gpu, asked: Sequence[Setup], model: Path) -> int:
    """As ``load_each``, where each part of the weights is on the GPU once."""
    weights = count_once(model, "".join(sorted({*"".join(each.roles for each in asked)})))
    taken = weights
    for setup in asked:
        gpu.used = {"cuda": weights + CONTEXT_BYTES}
        load_instance(replace_setup(setup, shelf="weights.sock"))
        taken += CONTEXT_BYTES + gpu.made[setup.name]
    return taken


@pytest.mark.parametrize("placement", [("E", "P", "D"), ("EPD", "EPD"), ("EP", "D", "D"), ("P",) * 3 + ("D",) * 3])
def test_weights_that_processes_share_are_counted_once(
    gpu: Gpu, model: Path, placement: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = setups(model, [Instance(roles) for roles in placement])
    load_each(gpu, asked, model)
    apart = sum(gpu.made.values())
    monkeypatch.setattr(weights, "can_share", lambda device: device == "cuda")
    taken = load_sharing(gpu, asked, model)
    assert 0.75 * TOTAL < taken <= TOTAL
    copies = sum(count_once(model, roles) for roles in placement) - count_once(
        model, "".join(sorted({*"".join(placement)}))
    )
    assert sum(gpu.made.values()) - apart == pytest.approx(0.8 * copies, rel=0.01), "what copies took is for pools"


def test_one_that_was_started_by_hand_has_its_own(gpu: Gpu, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "can_share", lambda device: True)
    asked = setups(model, [Instance("P"), Instance("D"), Instance("D", address="tcp:127.0.0.1:7000")])
    assert [each.shares for each in asked[0].beside] == [True, False]
    found = []
    for sharing in (asked, [replace_setup(each, beside=each.beside[:1]) for each in asked]):
        load_sharing(gpu, sharing[:1], model)
        found.append(gpu.made["P0"])
    assert found[0] < 0.6 * found[1], "its weights and pools are taken off"


@pytest.mark.parametrize("quantised", [False, True])
def test_where_weights_are_not_shared_each_copy_counts(
    gpu: Gpu, model: Path, monkeypatch: pytest.MonkeyPatch, quantised: bool, tmp_path: Path
) -> None:
    """On a GPU that cannot, and of quantised checkpoints."""
    monkeypatch.setattr(weights, "can_share", lambda device: quantised)
    if quantised:
        config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
        model = tmp_path
        (model / "config.json").write_text(json.dumps(config))
    asked = setups(model, [Instance("P"), Instance("D")])
    load_each(gpu, asked, model)
    apart = dict(gpu.made)
    load_each(gpu, [replace_setup(each, shelf="weights.sock") for each in asked], model)
    assert gpu.made == apart


# ------------------------------------------------------------ instances in threads


def in_threads(gpu: Gpu, model: Path, *instances: Instance) -> dict[str, int]:
    config = ServingConfig(model, dtype="bfloat16", device="cuda:0")
    gpu.used = {"cuda:0": 14 * GIB, "cuda:1": 14 * GIB}
    load_instances(config, name_instances(instances), None)
    return gpu.made


def test_threads_divide_by_role(gpu: Gpu, model: Path) -> None:
    made = in_threads(gpu, model, Instance("E"), Instance("P"), Instance("D"))
    assert made["E0"] < made["P0"] < made["D0"]
    assert sum(made.values()) <= 0.8 * (TOTAL - 14 * GIB)


def test_threads_divide_among_those_of_their_own_gpu(gpu: Gpu, model: Path) -> None:
    apart = [Instance("D", device=f"cuda:{number}") for number in (0, 1)]
    made = in_threads(gpu, model, *apart)
    assert made["D0"] == made["D1"] == pytest.approx(0.8 * (TOTAL - 14 * GIB), rel=0.01)


def test_pools_that_are_set_are_not_for_the_others(gpu: Gpu, model: Path) -> None:
    made = in_threads(gpu, model, Instance("D", pools={"kv": 10_000}), Instance("D"))
    assert made["D0"] == 10_000 * 8 * (1 << 20)
    assert made["D1"] <= 0.8 * (TOTAL - 14 * GIB) - made["D0"]


# ------------------------------------------------------------ on a CPU; weights; no memory


def test_processes_on_a_cpu_divide_its_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of its copies are chosen, and on a GPU compiled, before an instance serves."""
    warmed: list[object] = []
    monkeypatch.setattr(host, "warm_up_blocks", warmed.append)
    monkeypatch.setattr(loader, "available_memory", lambda: 8 << 20)
    config = replace(ServingConfig(checkpoint("llava"), dtype="float32"), device="cpu")
    found = []
    for count in (1, 4):
        asked = make_setups(name_instances([Instance("PD")] * count), config, Connector("shm"), "round_robin")
        loaded = load_instance(asked[0])
        found.append(sum(memory.blocks * memory.block_bytes for memory in loaded.memory.values()))
        for memory in loaded.memory.values():
            memory.close()
    assert warmed == ["cpu"] * 2
    assert found[0] <= 1 << 20
    assert found[1] <= found[0] // 4


@pytest.mark.parametrize(
    ("name", "letters"),
    [(name, letters) for name in ("llava", "qwen2_vl", "gemma3") for letters in ("E", "D", "EPD")] + [("llama", "PD")],
)
def test_weights_are_counted_without_loading_them(name: str, letters: str) -> None:
    counted = count_weight_bytes(checkpoint(name), letters, dtype="bfloat16")
    assert counted == load_model(checkpoint(name), letters, dtype="bfloat16").weight_bytes


def test_a_gpu_without_room_for_a_pool_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match=r"cuda:0 cannot hold a pool of 1,024 bytes .*pools= or memory_bytes="):
        BlockMemory(BlockShape("kv", (64,), torch.float32), 4, "cuda:0")


def test_copies_to_profile_need_no_room_beside_pools_that_are_there(
    gpu: Gpu, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While serving, what users have set is gone from the free memory already."""
    made: list[dict[str, int]] = []
    monkeypatch.setattr(loader, "_build_copy", lambda config, spec, model, pools: made.append(pools))
    monkeypatch.setattr(loader, "profile_tables", lambda *given, **counts: "tables")
    specs = name_instances([Instance("P", pools={"image": 8, "kv": 64}), Instance("D")])
    config = ServingConfig(model, dtype="bfloat16", device="cuda")
    hosts: Any = {
        spec.name: SimpleNamespace(
            loaded=SimpleNamespace(model=loader._get_model(config, spec), memory={"kv": SimpleNamespace(blocks=blocks)})
        )
        for spec, blocks in zip(specs, (64, 900), strict=True)
    }
    gpu.used = {"cuda": TOTAL}
    loader.profile_copies(config, specs, cast(Any, None), hosts)
    assert made == [{"kv": 64}, {"kv": 900}]


def test_a_relative_model_stays_where_it_was_given(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(model.parent)
    found = loader.resolve_model(model.name)
    monkeypatch.chdir(tmp_path)
    assert found == model
