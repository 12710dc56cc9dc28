"""Steps of one EPD instance on a device: decode, prefill, both and encode, with CUDA graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import Device, Roofline
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances, make_processor
from trinity.runtime.profiler import Probe
from trinity.stages.base import Stage
from trinity.stages.encode import MOST_GRAPH_ITEMS

BLOCK, MOST_MEMORY = 16, 0.75  # tokens of a KV block; share of the device's memory for KV
_GRAPHS = ("_graphs", "_prefill_graphs")


class StepSizes(Protocol):
    """Sizes that the steps are measured at."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def prefills(self) -> tuple[int, ...]: ...
    @property
    def images(self) -> tuple[int, ...]: ...
    @property
    def chunks(self) -> tuple[int, ...]: ...
    @property
    def mixed(self) -> tuple[int, ...]: ...
    @property
    def beside(self) -> int: ...
    @property
    def repeats(self) -> int: ...


@dataclass(frozen=True)
class StepCase:
    """A step of ``n`` rows, tokens or images, replayed from a graph or not.

    ``what``: "decode"; "prefill" of whole prompts; "chunk", so few tokens behind half of the context that a graph may
    serve; "mixed", such tokens beside decodes; "encode".
    """

    what: str
    n: int
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.what} {self.n}{', graph' if self.graphs else ''}"


class StepBench:
    """An instance that is loaded when the first case asks for it. ``hold`` is called before, to share weights."""

    def __init__(self, model: Path, limit: Device, sizes: StepSizes, hold: Callable[[], None]) -> None:
        self.model, self.limit, self.sizes, self._hold = model, limit, sizes, hold
        self.shape = read_model_shape(model)
        self._loaded: LoadedInstance | None = None
        self._probe: Probe | None = None

    @property
    def loaded(self) -> bool:
        return self._loaded is not None

    def list_cases(self) -> list[StepCase]:
        """List what fits; with graphs first, since an instance that has dropped them stays without."""
        block_bytes, blocks = BLOCK * self.shape.kv_bytes, self.blocks
        fitting = [n for n in self.sizes.rows if n * block_bytes * blocks < MOST_MEMORY * self.limit.memory]
        found = []
        for graphs in (True, False) if self.sizes.device.startswith("cuda") else (False,):
            found += [StepCase("decode", n, graphs) for n in fitting]
            found += [StepCase("encode", n, graphs) for n in self.sizes.images if not graphs or n <= MOST_GRAPH_ITEMS]
            found += [StepCase("chunk", n, graphs) for n in self.sizes.chunks]
            if self.sizes.beside in fitting:
                found += [StepCase("mixed", n, graphs) for n in self.sizes.mixed]
        return found + [StepCase("prefill", n, False) for n in self.sizes.prefills]

    @property
    def blocks(self) -> int:
        """KV blocks of one decode row."""
        return -(-(self.sizes.context + 2) // BLOCK)

    def measure(self, case: StepCase) -> dict[str, Any]:
        """Measure a case, host time included, after two steps that compile and record."""
        probe = self._get_probe()
        if not case.graphs and self._loaded is not None:
            drop_graphs(self._loaded)
        cost, n = Roofline(model=self.shape, device=self.limit), case.n
        context, beside = self.sizes.context, self.sizes.beside
        runs: dict[str, tuple[Callable[[], float], float]] = {
            "decode": (lambda: probe.decode(n, context), cost.at(n, 0, 0, context=context)),
            "chunk": (lambda: probe.prefill(n, context // 2), cost.at(0, n, 0, context=0, prefilled=context // 2)),
            "mixed": (lambda: probe.mixed(beside, context, n), cost.at(beside, n, 0, context=context)),
            "encode": (lambda: probe.encode(n), cost.seconds(0, 0, n * probe.image_tokens)),
            "prefill": (lambda: probe.prefill(n), cost.seconds(0, n, 0)),
        }
        seconds, limit = runs[case.what]
        found = [seconds() for _ in range(2 + self.sizes.repeats)][2:]
        return {"what": case.what, "n": n, "graphs": case.graphs, "seconds": found, "limit_s": limit}

    def _get_probe(self) -> Probe:
        if self._probe is None:
            self._hold()
            decodes = [case.n for case in self.list_cases() if case.what == "decode"]
            tokens = [*self.sizes.prefills, *self.sizes.mixed, *(self.sizes.context + n for n in self.sizes.chunks), 1]
            longest = -(-max(tokens) // BLOCK) + 1
            held = {"kv": max([*decodes, 1]) * self.blocks + longest, "image": max(self.sizes.images) + 1}
            config = ServingConfig(
                self.model, dtype=self.sizes.dtype, device=self.sizes.device, cache=CacheConfig(pools=held)
            )
            processor = make_processor(self.model)
            (self._loaded,) = load_instances(config, [Instance("EPD")], processor)
            self._probe = Probe(self._loaded, processor)
        return self._probe

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._probe = self._loaded = None


def stages_with_graphs(loaded: LoadedInstance) -> list[Stage]:
    """List the stages that use CUDA graphs."""
    return [stage for stage in loaded.stages if any(getattr(stage, name, None) is not None for name in _GRAPHS)]


def drop_graphs(loaded: LoadedInstance) -> None:
    """Have the stages run as they are from now on."""
    for stage in stages_with_graphs(loaded):
        vars(stage).update({name: None for name in _GRAPHS if name in vars(stage)})
