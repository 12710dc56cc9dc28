"""Memory of E, P and D instances, and their capacity in one memory budget (EPDServe tables 2, 3 and 8)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.memory import epdserve_tables
from benchmarks.memory.shapes import SHAPES
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.costs.pool_sizes import Capacity, ModelMemory, capacity, format_size

ROLES = ("E", "P", "D", "EPD")
KINDS = ("E", "P", "D", "PD", "EP", "EPD")
PROBE = Path(__file__).with_name("probe.py")
IMAGES = 10  # of a request, as in EPDServe's table 3
TEXT_TOKENS = 32
BUDGET, LARGE_BUDGET = 1 << 30, 80 << 30


def probe(directory: Path, roles: str, images: int) -> dict[str, Any]:
    """Sizes in bytes of an instance in a fresh process; see ``memory_probe``."""
    command = [sys.executable, str(PROBE), str(directory), roles, str(images)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the probe of {roles} failed:\n{run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def run(setting: Setting) -> Result:
    """Resident size of an E, a P and a D instance and of the whole model; capacities for one memory budget."""
    directory = setting.pick("llava-110m", "llava")
    roles, at_once = (("E", "EPD"), 2) if setting.quick else (ROLES, 1)
    with ThreadPoolExecutor(at_once) as pool:
        found = dict(zip(roles, pool.map(lambda each: probe(directory, each, 4), roles), strict=True))
    held = {"llava-110m (float32)": Held.of(measured_memory(found), BUDGET, IMAGES)}
    held |= {
        f"{shape.name} (bfloat16)": Held.of(shape.memory(TEXT_TOKENS), LARGE_BUDGET, shape.images) for shape in SHAPES
    }
    return result(found, held)


def measured_memory(found: Mapping[str, Any]) -> ModelMemory:
    """What serving the measured checkpoint takes. The context is left open: three images would fill it."""
    encode, whole = found["E"], found["EPD"]
    blocks, prompt = whole["block_bytes"], whole["prompt_tokens"]
    return ModelMemory(
        vision_bytes=encode["weight_bytes"],
        language_bytes=whole["weight_bytes"] - encode["weight_bytes"],
        image_tokens=whole["image_tokens"],
        feature_bytes=blocks["image"] // 576,
        kv_bytes=blocks["kv"] // 16,
        encode_bytes=encode["work_bytes"]["E"] // encode["images"],
        prefill_bytes=whole["work_bytes"]["P"] // prompt,
        text_tokens=TEXT_TOKENS,
    )


@dataclass(frozen=True)
class Held:
    """What instances of every kind hold of one model in ``budget`` bytes, for requests of ``images`` images."""

    model: ModelMemory
    budget: int
    images: int
    kinds: dict[str, Capacity]

    @classmethod
    def of(cls, model: ModelMemory, budget: int, images: int) -> Held:
        return cls(model, budget, images, {kind: capacity(kind, model, budget, images=images) for kind in KINDS})

    @property
    def apart(self) -> int:
        """Images of one request that E and P hold apart."""
        return min(self.kinds["E"].images_per_request, self.kinds["P"].images_per_request)

    def rows(self) -> list[list[str]]:
        return [
            [kind, str(each.images_per_request), str(each.batch), str(each.kv_tokens), f"{each.kv_share:.0%}"]
            for kind, each in self.kinds.items()
        ]


def result(found: Mapping[str, Any], held: Mapping[str, Held]) -> Result:
    weights = found["E"]["weight_bytes"] / found["EPD"]["weight_bytes"]
    tables = [Table("llava-110m in float32, MiB", RESIDENT, [resident_row(r, found) for r in found])]
    tables += [
        Table(f"{name}, {format_size(each.budget)} an instance, requests of {each.images} images", HELD, each.rows())
        for name, each in held.items()
    ]
    tables.append(Table("E and P apart beside E and P together", RATIOS, [ratio_row(*each) for each in held.items()]))
    tables += epdserve_tables.tables()
    return Result(
        name="memory",
        title="Memory of instances, and what they hold",
        method=(
            "Each instance in a fresh process that loads it as a pipeline does and runs a step of each of its stages; "
            "sizes are above those of the same process with the libraries imported; weights are not packed. "
            "Capacities: `sizing.capacity`, as "
            "EPDServe counts: all images of a request at once, and four fifths of what the weights leave for the "
            "KV cache where an instance has both. llava-110m with its measured working memory and no context limit; "
            "the larger models by their published shapes, images of 4032 × 3024 where a model cuts them into tiles. "
            "Their working memory is that of the widest layer's rows, for MiniCPM-V with an attention that keeps its "
            "scores, as EPDServe's did."
        ),
        tables=tables,
        aims=[encoder_aim(found)],
        notes=[
            f"By weights alone an E instance of llava-110m is {weights:.0%} of the whole; the rest of what it "
            "holds is working memory. Libraries: pages of their files, of which a host has one copy for all instances, "
            "and which come into a process as their code first runs.",
            "trinity encodes within an image budget, one image a step by default, so its own encode instances need "
            "working memory for one image, whatever the request has; the counts above do not use that.",
            *epdserve_tables.notes(),
        ],
        values={
            "resident": dict(found),
            "capacity": {name: {kind: each._asdict() for kind, each in held[name].kinds.items()} for name in held},
            "model": {name: msgspec.to_builtins(each.model) for name, each in held.items()},
        },
    )


RESIDENT = ("instance", "weights", "resident", "of the whole", "less libraries", "of the whole", "private")
ENCODER_AIM = 0.22  # of the whole, where its weights are 0.21
HELD = ("instance", "images a request", "batch", "KV tokens", "KV share")
RATIOS = ("model", "images a request", "batch E", "batch P", "KV share")


SHOWN = ("rss", "held", "private")


def added(sizes: Mapping[str, Any], kind: str) -> int:
    """Bytes that the instance added to its process."""
    return int(sizes["worked"][kind] - sizes["imported"][kind])


def encoder_aim(found: Mapping[str, Any]) -> Aim:
    measured, resident = share("E", found, "held"), share("E", found, "rss")
    return Aim(
        "an E instance's share of what the whole model holds",
        f"≤ {ENCODER_AIM:.0%}",
        f"{measured:.1%} ({resident:.1%} with pages of libraries)",
        measured <= ENCODER_AIM,
    )


def share(roles: str, found: Mapping[str, Any], kind: str) -> float:
    """Share of what the whole model's instance holds."""
    return added(found[roles], kind) / added(found["EPD"], kind)


def resident_row(roles: str, found: Mapping[str, Any]) -> list[str]:
    sizes = found[roles]
    numbers = [f"{size / 2**20:.0f}" for size in (sizes["weight_bytes"], *(added(sizes, kind) for kind in SHOWN))]
    shares = [f"{share(roles, found, kind):.0%}" for kind in SHOWN[:2]]
    return [roles, *numbers[:2], shares[0], numbers[2], shares[1], numbers[3]]


def ratio_row(name: str, held: Held) -> list[str]:
    together, encode, prefill = (held.kinds[kind] for kind in ("EP", "E", "P"))
    return [
        name,
        times(together.images_per_request, held.apart),
        times(together.batch, encode.batch),
        times(together.batch, prefill.batch),
        f"{together.kv_share:.0%} → {prefill.kv_share:.0%}",
    ]


def times(together: float, apart: float) -> str:
    """As "7 → 49 (7.0 ×)"."""
    return f"{together:g} → {apart:g}" + (f" ({apart / together:.1f} ×)" if together else "")
