"""Seconds of a step: by a roofline over a device's figures, or from tables measured on it; and of a transfer.

TriInfer's table 2 with what is wrong there put right: real feed-forward shapes, H² where it has H, fewer key-value
heads than heads, bytes in place of elements, no attention scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec

from trinity.costs.budgets import StepCost
from trinity.costs.model_shape import Model
from trinity.errors import ConfigError, UnknownName
from trinity.traces.trace import Number

_ACTIVATIONS = 18  # elements of activations read and written for each token and width of a layer (table 2: 8 + 10)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device: peak FLOP/s (dense, 16 bit), bytes/s, bytes of memory, price an hour.

    Of the peaks ``flops_share`` and ``bandwidth_share`` are reached. Every pass over the language model or the encoder
    takes ``pass_s`` more (launches without CUDA graphs, as TriInfer measures), and each sequence in it ``row_s``.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    flops_share: float = 0.6
    bandwidth_share: float = 0.8
    pass_s: float = 0.02
    row_s: float = 2e-5
    price: float | None = None

    def __post_init__(self) -> None:
        figures = (self.flops, self.bandwidth, self.memory, self.flops_share, self.bandwidth_share)
        extras = (self.pass_s, self.row_s, self.price or 0.0)
        shares = max(self.flops_share, self.bandwidth_share) <= 1
        if not (
            shares and all(0 < each < math.inf for each in figures) and all(0 <= each < math.inf for each in extras)
        ):
            raise ConfigError(
                f"{self!r}: figures of a device are positive, shares at most 1, times and price at least 0"
            )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(name="H20", flops=148e12, bandwidth=4.8e12, memory=141e9),
        Device(name="A100", flops=312e12, bandwidth=2.04e12, memory=80e9),
        Device(name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9),
        Device(name="H200", flops=989e12, bandwidth=4.8e12, memory=141e9),
        Device(name="L40S", flops=362e12, bandwidth=0.864e12, memory=48e9),
        Device(name="cpu", flops=60e9, bandwidth=10e9, memory=8e9, pass_s=0.002),  # two cores of a small server
    )
}


def device(name: str) -> Device:
    """A device by its name in ``DEVICES``. Raises ``UnknownName``."""
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES, "For another one give a trinity.costs.step_cost.Device.")
    return DEVICES[name]


class Cost(Protocol):
    """Seconds of a step: a ``Roofline``, measured ``Tables``, or the plainer costs of
    ``trinity.emulation.paced_model``.
    """

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Of one step with these rows."""
        ...

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
    ) -> float:
        """The same where decodes look back on ``context`` tokens each, and ``prefills`` on ``prefilled`` (means)."""
        ...


class Roofline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a step takes by the model's shape and the device's figures.

    max(FLOP / reached FLOP/s, bytes / reached bytes/s) for the language pass and the encode pass, each with its
    overhead. ``context``: tokens that a decode looks back on where it is not said.
    """

    model: Model
    device: Device
    context: int = 512

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Of one step with these rows; prefills begin at their first token. Never falls when a count grows."""
        return self.at(decodes, prefill_tokens, media_tokens, context=self.context)

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
    ) -> float:
        """Of one step whose decodes look back on ``context`` tokens each on average.

        The ``prefill_tokens`` belong to ``prefills`` requests, of which ``prefilled`` tokens each are in the KV cache
        already. Encode and language pass run one after the other.
        """
        return self._language(decodes, prefill_tokens, context, prefilled, max(1, prefills)) + self._encode(
            media_tokens
        )

    def _language(self, decodes: int, tokens: int, context: float, prefilled: float, prefills: int) -> float:
        if decodes <= 0 and tokens <= 0:
            return 0.0
        model, layers = self.model, self.model.language
        sequences = decodes + (prefills if tokens else 0)
        pairs = decodes * context + tokens * (prefilled + tokens / prefills / 2)
        flops = 2 * ((decodes + tokens) * layers.weights + sequences * model.head + pairs * layers.attended)
        looked_at = decodes * context + (prefills * prefilled if tokens else 0.0)
        activations = _ACTIVATIONS * (decodes + tokens) * layers.layers * layers.width * model.dtype_bytes
        moved = model.read_bytes + (looked_at + decodes + tokens) * model.kv_bytes + activations
        return self._pass(flops, moved) + sequences * self.device.row_s

    def _encode(self, tokens: int) -> float:
        vision = self.model.vision
        if tokens <= 0 or vision is None:
            return 0.0
        patches, layers = tokens * vision.patches, vision.layers
        flops = 2 * (patches * layers.weights + tokens * vision.projector + patches * vision.span * layers.attended)
        activations = _ACTIVATIONS * patches * layers.layers * layers.width * self.model.dtype_bytes
        moved = self.model.vision_bytes + activations + tokens * self.model.feature_bytes
        return self._pass(flops, moved)

    def _pass(self, flops: float, moved: float) -> float:
        here = self.device
        compute, memory = flops / (here.flops * here.flops_share), moved / (here.bandwidth * here.bandwidth_share)
        return max(compute, memory) + here.pass_s


def cost_on(device: Device, model: Model, given: Cost | Mapping[str, Cost] | None) -> Cost:
    """What is ``given`` for every device, or for this one by its name; a roofline where nothing is.

    Raises ``ConfigError`` where costs are given by name, and none for this one.
    """
    if given is None:
        return Roofline(model=model, device=device)
    if not isinstance(given, Mapping):
        return given
    if device.name not in given:
        raise ConfigError(f"no cost is given for device {device.name}: there are {', '.join(given)}")
    return given[device.name]


def interference_of(given: Cost | Mapping[str, Cost] | None) -> float:
    """How much two lanes of an instance slow each other down, as measured with these costs; 1 where it was not."""
    costs = given.values() if isinstance(given, Mapping) else [given]
    return max([1.0, *(float(getattr(each, "interference", 1.0)) for each in costs)])


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What joins two instances: bytes/s that are reached, and seconds that a transfer takes at least."""

    name: str
    bandwidth: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 <= self.fixed_s < math.inf):
            raise ConfigError(f"{self!r}: a bandwidth is positive and a fixed time at least 0")

    def seconds(self, size: float) -> float:
        """Of a transfer of ``size`` bytes; 0 where there is nothing to move."""
        return self.fixed_s + size / self.bandwidth if size > 0 else 0.0


LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (  # four fifths of what is printed on them
        Link(name="nvlink", bandwidth=360e9, fixed_s=2e-4),
        Link(name="infiniband-2x200", bandwidth=40e9, fixed_s=5e-4),
        Link(name="pcie4", bandwidth=25e9, fixed_s=3e-4),
        Link(name="memory", bandwidth=5e9, fixed_s=2e-4),
    )
}


class Probes(Protocol):
    """What runs and times a step of one kind on an instance: a ``trinity.runtime.profiler.Probe``."""

    @property
    def letters(self) -> str: ...  # the stages that it can run, of "EPD"
    @property
    def longest(self) -> int: ...  # tokens of the longest prompt that it has room for
    @property
    def image_tokens(self) -> int: ...
    def most_images(self) -> int: ...
    def encode(self, images: int) -> float: ...
    def prefill(self, tokens: int, prefilled: int = 0) -> float: ...
    def decode(self, rows: int, context: int | None = None) -> float: ...


CONTEXTS = (1, 512, 2048)
ROWS = (1, 4, 16, 64)
TOKENS = (1, 64, 256, 1024)
IMAGES = (1, 2, 4)


class Tables(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measured seconds of a step on one device: ``StepCost`` at each mean context (decodes) or prefix (prefills).

    Between two contexts on the line that joins them; beyond the last as at the last two, never less than at the last.
    It names what was measured: instances and plans can tell whether it is theirs. Seconds are those of a step alone;
    ``interference``: how many times longer it takes beside the other lane of its instance, 1 where none has two.
    """

    model: str
    device: str
    dtype: str
    source: str
    costs: tuple[tuple[Number, StepCost], ...]
    context: float = 512
    interference: float = 1.0

    def __post_init__(self) -> None:
        contexts = [context for context, _ in self.costs]
        if not contexts or contexts != sorted(set(contexts)):
            raise ConfigError("measured tables need at least one context, in ascending order")
        if not 1 <= self.interference < math.inf:
            raise ConfigError(f"interference is at least 1, got {self.interference!r}")

    @classmethod
    def measured(
        cls,
        contexts: Mapping[int, Mapping[str, Mapping[int, float]]],
        *,
        model: str,
        device: str,
        dtype: str,
        source: str = "measured",
    ) -> Tables:
        """From seconds by context, kind ("decodes", "prefill", "media") and count; noise is taken out of each kind.

        A kind that was not measured at a context costs there what it costs at the next shorter one. Media are looked
        up at the shortest context alone: they do not hang on it.
        """
        costs: list[tuple[float, StepCost]] = []
        known: dict[str, Mapping[int, float]] = {}
        for context in sorted(contexts):
            known |= {kind: seconds for kind, seconds in contexts[context].items() if seconds}
            costs.append((context, StepCost.measured(**known)))
        return cls(model=model, device=device, dtype=dtype, source=source, costs=tuple(costs))

    @classmethod
    def taken(
        cls,
        probe: Probes,
        *,
        model: str,
        device: str,
        dtype: str,
        contexts: Sequence[int] = CONTEXTS,
        rows: Sequence[int] = ROWS,
        tokens: Sequence[int] = TOKENS,
        images: Sequence[int] = IMAGES,
        repeats: int = 3,
    ) -> Tables:
        """Measure a live instance per stage, batch and context; the median of ``repeats`` after a first, unused run.

        What the instance has no room for is left out: prompts longer than its pool, more images than its cache holds.
        Raises ``ConfigError`` where that leaves nothing.
        """
        known = sorted({min(context, probe.longest) for context in contexts if context > 0})
        if not known or repeats < 1:
            raise ConfigError(f"give a context of at least 1 token and 1 repeat, got {contexts!r} and {repeats}")
        found: dict[int, dict[str, dict[int, float]]] = {context: {} for context in known}

        def seconds(run: Callable[[], float]) -> float:
            run()
            return median(run() for _ in range(repeats))

        for context, kinds in found.items():
            if "D" in probe.letters:
                kinds["decodes"] = {n: seconds(partial(probe.decode, n, context)) for n in rows}
            if "P" in probe.letters:
                room = [n for n in tokens if n + context <= probe.longest]
                kinds["prefill"] = {n: seconds(partial(probe.prefill, n, context)) for n in room}
        if "E" in probe.letters:
            each = probe.image_tokens
            room = [n for n in images if n <= probe.most_images()]
            found[known[0]]["media"] = {n * each: seconds(partial(probe.encode, n)) for n in room}
        if not any(seen for kinds in found.values() for seen in kinds.values()):
            raise ConfigError("nothing could be measured: the instance has room for none of these steps")
        return cls.measured(found, model=model, device=device, dtype=dtype, source="profiled on a live instance")

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Of one step with these rows at the mean ``context``, prefills from their first token."""
        return self.at(decodes, prefill_tokens, media_tokens, context=self.context)

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
    ) -> float:
        """As ``Roofline.at``: media do not hang on a context, prefills on what is ``prefilled``."""
        language = self._between(context, lambda cost: cost.seconds(decodes, 0, 0))
        prefill = self._between(prefilled, lambda cost: cost.seconds(0, prefill_tokens, 0))
        both = self.costs[0][1].seconds(decodes, prefill_tokens, 0)
        shared = self.costs[0][1].seconds(decodes, 0, 0) + self.costs[0][1].seconds(0, prefill_tokens, 0) - both
        together = max(language, prefill, language + prefill - shared)  # noise: what is shared may exceed both
        return together + self.costs[0][1].seconds(0, 0, media_tokens)

    def _between(self, context: float, seconds: Callable[[StepCost], float]) -> float:
        costs = self.costs
        place = next((n for n, (known, _) in enumerate(costs) if known >= context), len(costs) - 1)
        high = seconds(costs[place][1])
        if place == 0 or len(costs) == 1:
            return high
        low = seconds(costs[place - 1][1])
        (near, _), (far, _) = costs[place - 1], costs[place]
        return low + max(0.0, high - low) * (context - near) / (far - near)

    def save(self, path: str | Path) -> None:
        """Write it as JSON. The file names model, device and dtype."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None, device: str | None = None) -> Tables:
        """Read what ``save`` wrote. Raises ``ConfigError`` where it is none, or of another model or device."""
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} holds no measured costs of trinity: {error}") from error
        for name, wanted, has in (("model", model, found.model), ("device", device, found.device)):
            if wanted is not None and wanted != has:
                raise ConfigError(f"{path} was measured on {name} {has!r}, not on {wanted!r}: measure it anew")
        return found
