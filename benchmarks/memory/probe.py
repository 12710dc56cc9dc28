"""One instance in a process of its own: what the process holds before and after loading it and after work.

python benchmarks/memory/probe.py DIRECTORY ROLES [IMAGES] prints one line of JSON. It loads the instance as a pipeline
does, runs one step of each of its stages, and, where it encodes, one more that encodes IMAGES images at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from trinity.memory.cache_config import CacheConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")
PROMPT_TOKENS = 640


def resident() -> dict[str, int]:
    """Bytes resident in this process: all, each page's share of those that use it, those of this process alone.

    ``held``: all but pages of libraries' files, of which a host has one copy, and which come as their code first runs.
    """
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"rss": sizes["Rss"], "pss": sizes["Pss"], "private": private, "held": sizes["Rss"] - libraries()}


def libraries() -> int:
    """Bytes resident of mapped shared libraries."""
    found, library = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss" and library:
            found += int(rest.split()[0]) * 1024
        elif "-" in name.partition(" ")[0]:  # the first line of a mapping
            library = ".so" in line
    return found


def peak() -> int:
    """The most bytes that were resident at once since ``forget_peak``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def probe(directory: Path, roles: str, images: int) -> dict[str, Any]:
    """Sizes in bytes: ``imported`` libraries only, ``loaded`` with weights and pools, ``worked`` after steps."""
    import torch

    from trinity.instance import Instance
    from trinity.memory.freed_memory import release_freed_memory
    from trinity.preprocess.processor import RequestProcessor
    from trinity.runtime.loader import ServingConfig, load_instances
    from trinity.runtime.model_classes import import_model_classes
    from trinity.runtime.profiler import Probe

    torch.set_num_threads(1)
    processor = RequestProcessor(directory)
    processor.dummy_inputs()  # libraries that are imported at first use count as imported, and the model's classes
    import_model_classes(directory)
    release_freed_memory()  # of the imports
    imported = resident()
    pools = {"image": 2 * images, "kv": 2 * PROMPT_TOKENS // 16}
    (loaded,) = load_instances(
        ServingConfig(directory, dtype="float32", cache=CacheConfig(pools=pools)),
        [Instance(roles, roles, pack=False)],
        processor,
    )
    sizes: dict[str, Any] = {"imported": imported, "loaded": resident(), "weight_bytes": loaded.model.weight_bytes}
    work = Probe(loaded, processor)
    steps = {"E": lambda: work.encode(1), "P": lambda: work.prefill(PROMPT_TOKENS), "D": lambda: work.decode(1)}
    for letter in roles:
        steps[letter]()
    sizes["worked"] = resident()
    again = {"E": lambda: work.encode(images), "P": steps["P"], "D": steps["D"]}
    return {
        **sizes,
        "work_bytes": {letter: _peak_of(again[letter]) for letter in roles},
        "block_bytes": {kind: pool.block_bytes for kind, pool in loaded.memory.items()},
        "images": images,
        "image_tokens": work.image_tokens,
        "prompt_tokens": PROMPT_TOKENS,
    }


def _peak_of(step: Any) -> int:
    """Bytes resident at most while the step runs, above what was resident before."""
    before = resident()["rss"]
    forget_peak()
    step()
    return max(0, peak() - before)


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4)))
