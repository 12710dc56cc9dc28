"""Encode and decode of one instance at full load, in turns or on two lanes at once: TriInfer's figure 12 on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.serving import DUAL
from benchmarks.serving.dual_stream import timed
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import Probe

BLOCK = 16


class FullLoad:
    """An instance with one lane and one with two, on the same weights, loaded when first asked for."""

    def __init__(self, model: Path, device: str, dtype: str, context: int, hold: Callable[[], None]) -> None:
        self.model, self.device, self.dtype, self.context = model, device, dtype, context
        self._hold, self._stack = hold, ExitStack()
        self._probes: list[Probe] = []

    def _load(self, rows: int) -> Sequence[Probe]:
        if not self._probes:
            self._hold()
            pools = {"image": 2, "kv": rows * (self.context // BLOCK + 2)}
            config = ServingConfig(self.model, dtype=self.dtype, device=self.device, cache=CacheConfig(pools=pools))
            processor = self._stack.enter_context(closing(make_processor(self.model)))
            both = name_instances([Instance("EPD"), Instance("EPD", lanes=DUAL)])
            for loaded in load_instances(config, both, None):
                self._probes.append(self._stack.enter_context(closing(Probe(loaded, processor))))
        return self._probes

    def measure(self, rows: int, most: int, repeats: int) -> dict[str, Any]:
        """Measure seconds of an encode of one image and of a decode of ``rows``, each alone and beside the other.

        ``work`` is the work done beside each other by the work done in turns: 1.0 gains nothing. ``most``: rows of the
        largest case.
        """
        turns, lanes = self._load(most)
        encode, decode = partial(turns.encode, 1), partial(turns.decode, rows, self.context)
        alone = {"encode": timed(encode, None, repeats), "decode": timed(decode, None, repeats)}
        encode, decode = partial(lanes.encode, 1), partial(lanes.decode, rows, self.context)
        beside = {"encode": timed(encode, decode, repeats), "decode": timed(decode, encode, repeats)}
        work = sum(alone[stage] / beside[stage] for stage in alone)
        return {"rows": rows, "alone_s": alone, "beside_s": beside, "work": work}

    def close(self) -> None:
        self._stack.close()
        self._probes = []
