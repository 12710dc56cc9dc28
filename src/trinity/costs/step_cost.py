"""Cost models of a step, in seconds: a roofline over a device's figures, or measured tables.

The roofline is TriInfer's table 2 with its faults corrected: real feed-forward shapes, H² where it has H, grouped-query
attention (fewer key-value heads than heads), bytes in place of elements, no attention scores in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from trinity.costs.budgets import StepCost
from trinity.costs.engines import DEFAULT_ENGINE, ENGINES
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError, UnknownName, show
from trinity.errors.arguments import Count, KeywordsByName, Number, Whole, check_call, check_struct
from trinity.errors.files import name_file, read_regular_file, write_file
from trinity.stage_kinds import KINDS_OF_WORK, roles_of

_ACTIVATIONS = 18  # elements of activations moved for each token and unit of width of a layer (table 2: 8 + 10)


class Device(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """An accelerator, as the roofline sees it. Raises ``ConfigError`` for values out of range.

    name: name of the device.
    flops (FLOP/s): peak, dense, 16 bit.
    bandwidth (bytes/s): peak memory bandwidth.
    memory (bytes): device memory.
    flops_share (0.6): share of the peak FLOP/s that the language model reaches.
    vision_share (None): share that the encoder reaches; None: ``flops_share``.
    bandwidth_share (0.8): share of the peak bandwidth that is reached.
    pass_s (s, 0.001): overhead of every pass over the language model or the encoder.
    row_s (s, 5e-6): overhead of each sequence in a pass.
    engine ("graphs"): name of the engine that has these overheads, for reports.
    price (an hour, None): cost of the device, in any currency.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    flops_share: float = 0.6
    vision_share: float | None = None
    bandwidth_share: float = 0.8
    pass_s: float = ENGINES[DEFAULT_ENGINE].pass_s
    row_s: float = ENGINES[DEFAULT_ENGINE].row_s
    engine: str = DEFAULT_ENGINE
    price: float | None = None

    def __post_init__(self) -> None:
        check_struct(self)
        figures = (self.flops, self.bandwidth, self.memory, self.flops_share, self.bandwidth_share, self.encoding_share)
        extras = (self.pass_s, self.row_s, self.price or 0.0)
        shares = max(self.flops_share, self.bandwidth_share, self.encoding_share) <= 1
        if not (
            shares and all(0 < each < math.inf for each in figures) and all(0 <= each < math.inf for each in extras)
        ):
            raise ConfigError(
                f"{self!r}: figures of a device must be positive, shares at most 1, times and price at least 0"
            )

    @property
    def encoding_share(self) -> float:
        """Share of the peak FLOP/s that the encoder reaches."""
        return self.flops_share if self.vision_share is None else self.vision_share

    @check_call
    def under(self, engine: str) -> Device:
        """Copy the device with the overheads of an engine in ``ENGINES``. Raises ``UnknownName``."""
        if engine not in ENGINES:
            raise UnknownName("engine", engine, ENGINES)
        if self.engine not in ENGINES:
            return self  # of its own, as a CPU's
        pass_s, row_s = ENGINES[engine]
        return msgspec.structs.replace(self, pass_s=pass_s, row_s=row_s, engine=engine)


# Shares of H100, H200, A100 and L40S: fitted to the measured operator tables of NVIDIA AIConfigurator 0.12 (PyPI; vLLM
# 0.24 on H100, H200 and L40S, 0.14 on A100), steps of Llama-3.1-8B and of the encoder of Qwen3-VL-8B, so that each is
# within 20 % (tests/costs/test_published_steps.py has the points). The encoder's share on an A100 follows from the
# other three, where it is 0.68 of the language model's. The H20 is of the H100's generation and has its shares.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(name="H20", flops=148e12, bandwidth=4.8e12, memory=141e9, flops_share=0.67, vision_share=0.45),
        Device(
            name="A100",
            flops=312e12,
            bandwidth=2.04e12,
            memory=80e9,
            flops_share=0.78,
            vision_share=0.53,
            bandwidth_share=0.65,
        ),
        Device(name="H100", flops=989e12, bandwidth=3.35e12, memory=80e9, flops_share=0.67, vision_share=0.45),
        Device(name="H200", flops=989e12, bandwidth=4.8e12, memory=141e9, flops_share=0.67, vision_share=0.48),
        Device(name="L40S", flops=362e12, bandwidth=0.864e12, memory=48e9, flops_share=0.51, vision_share=0.36),
        # By their makers' data sheets (dense, 16 bit, sums in FP32; a B200 of a DGX): no measured steps are at hand.
        Device(name="B200", flops=2250e12, bandwidth=8e12, memory=180e9, vision_share=0.41),
        Device(name="MI300X", flops=1307e12, bandwidth=5.3e12, memory=192e9, vision_share=0.41),
        Device(name="A10", flops=125e12, bandwidth=0.6e12, memory=24e9, vision_share=0.41),
        Device(name="RTX 4090", flops=165e12, bandwidth=1.008e12, memory=24e9, vision_share=0.41),
        # two cores of a small server
        Device(name="cpu", flops=60e9, bandwidth=10e9, memory=8e9, pass_s=0.002, row_s=2e-5, engine="cpu"),
    )
}


@check_call
def get_device(name: str, engine: str = DEFAULT_ENGINE) -> Device:
    """Get a device by its name in ``DEVICES``, with the overheads of an engine. Raises ``UnknownName``."""
    if name not in DEVICES:
        raise UnknownName("device", name, DEVICES, "For another one give a trinity.costs.step_cost.Device.")
    return DEVICES[name].under(engine)


class CostModel(Protocol):
    """Predicts the seconds of a step: ``Roofline``, ``CostTables``, or the costs of ``trinity.costs.emulated_cost``."""

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Seconds of one step with these decode rows, prefill tokens and visual tokens."""
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
        image_tokens: float = 0.0,
    ) -> float:
        """Seconds of one step whose decodes attend to ``context`` tokens each and whose ``prefills`` requests have
        ``prefilled`` tokens each in the KV cache already (means).

        ``image_tokens``: visual tokens of a visual token's own image, on average (sum of squares over sum); 0: those of
        a typical image of the model.
        """
        ...


class Roofline(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True, tag=True):
    """Roofline cost model: a step's time from the model's shape and the device's figures.

    max(FLOP / reached FLOP/s, bytes / reached bytes/s) for the language pass and for the encode pass, each with its
    overhead. Of a mixture of experts a token is multiplied with those that it goes through, and a step reads those that
    any of its rows goes through, on average. ``context`` (tokens): attended to by a decode where ``seconds`` is not
    told.
    """

    model: ModelShape
    device: Device
    context: int = 512

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Seconds of one step with these rows; prefills start at their first token. Never falls when a count grows."""
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
        image_tokens: float = 0.0,
    ) -> float:
        """Seconds of one step whose decodes attend to ``context`` tokens each on average.

        The ``prefill_tokens`` belong to ``prefills`` requests that have ``prefilled`` tokens each in the KV cache
        already (chunked prefill, prefix cache). Encode and language pass run one after the other. ``image_tokens``:
        visual tokens of a visual token's own image, on average; 0: those of the model's typical image.
        """
        return self._language(decodes, prefill_tokens, context, prefilled, max(1, prefills)) + self._encode(
            media_tokens, image_tokens
        )

    def _language(self, decodes: int, tokens: int, context: float, prefilled: float, prefills: int) -> float:
        if decodes <= 0 and tokens <= 0:
            return 0.0
        model, layers = self.model, self.model.language
        sequences = decodes + (prefills if tokens else 0)
        pairs = decodes * context + tokens * (prefilled + tokens / prefills / 2)
        flops = 2 * ((decodes + tokens) * layers.active_weights + sequences * model.head + pairs * layers.attended)
        attended = decodes * context + (prefills * prefilled if tokens else 0.0)
        activations = _ACTIVATIONS * (decodes + tokens) * layers.layers * layers.width * model.dtype_bytes
        moved = model.step_bytes(decodes + tokens) + (attended + decodes + tokens) * model.kv_bytes + activations
        return self._pass(flops, moved, self.device.flops_share) + sequences * self.device.row_s

    def _encode(self, tokens: int, image: float) -> float:
        vision = self.model.encoder
        if tokens <= 0 or vision is None:
            return 0.0
        own = image if image > 0 else float(min(tokens, self.model.image_tokens))
        patches, layers = tokens * float(vision.patches), vision.layers
        # Attention is quadratic in the image's own patches in some layers, and bound to windows in the others.
        pairs = patches * (vision.full_layers * own * vision.patches + vision.windowed_layers * vision.span)
        products = patches * vision.patch_weights + float(tokens * vision.projector) + pairs * layers.attended_each
        activations = patches * (_ACTIVATIONS * layers.layers * layers.width * self.model.dtype_bytes)
        moved = activations + float(self.model.vision_bytes + tokens * self.model.feature_bytes)
        return self._pass(2 * products, moved, self.device.encoding_share)

    def _pass(self, flops: float, moved: float, share: float) -> float:
        here = self.device
        compute, memory = flops / (here.flops * share), moved / (here.bandwidth * here.bandwidth_share)
        return max(compute, memory) + here.pass_s


def cost_for_device(device: Device, model: ModelShape, given: CostModel | Mapping[str, CostModel] | None) -> CostModel:
    """Choose a device's cost model: ``given`` itself, its entry for the device's name, or a roofline where it is None.

    Raises ``ConfigError`` where costs are given by device name and this device has none.
    """
    if given is None:
        return Roofline(model=model, device=device)
    if not isinstance(given, Mapping):
        return given
    if device.name not in given:
        raise ConfigError(f"no cost is given for device {device.name}, only for {', '.join(given)}: add one")
    return given[device.name]


def interference_of(given: CostModel | Mapping[str, CostModel] | None) -> float:
    """Factor by which two lanes of an instance slow each other down, as measured with these costs; 1 where unknown."""
    costs = given.values() if isinstance(given, Mapping) else [given]
    return max([1.0, *(float(getattr(each, "interference", 1.0)) for each in costs)])


class CostProbe(Protocol):
    """Runs and times a step of one kind on an instance, in seconds; such as ``trinity.runtime.profiler.Probe``."""

    @property
    def letters(self) -> str: ...  # letters of the stages that it can run
    @property
    def longest(self) -> int: ...  # tokens of the longest prompt that fits
    @property
    def image_tokens(self) -> int: ...
    def most_images(self) -> int: ...
    def encode(self, images: int) -> float: ...
    def prefill(self, tokens: int, prefilled: int = 0) -> float: ...
    def decode(self, rows: int, context: int | None = None) -> float: ...


PROFILE_CONTEXTS = (1, 512, 2048)
PROFILE_ROWS = (1, 4, 16, 64)
PROFILE_TOKENS = (1, 64, 256, 1024)
PROFILE_IMAGES = (1, 2, 4)


_CONTEXTS = "measured tables need at least one context, finite and in ascending order"


class CostTables(
    msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True, tag="Tables"
):  # the tag of saved files
    """Measured cost model of one device: a ``StepCost`` for each mean context (decodes) or prefix (prefills).

    Contexts are in tokens. Interpolates linearly between two contexts, and extrapolates from the last two, never below
    the last.
    ``model``, ``device`` and ``dtype`` say what was measured, ``shape`` (``ModelShape.outline``, "" where unknown) its
    layers, so that instances and plans can check that it is theirs. Each second is above 0 and finite.
    Seconds are those of a step alone; ``interference`` (factor): how much longer a step takes beside the other lane of
    its instance, 1 where instances have one lane. ``context`` (tokens): assumed by ``seconds``. Raises ``ConfigError``.
    """

    model: str
    device: str
    dtype: str
    source: str
    costs: Annotated[tuple[tuple[Number, StepCost], ...], Meta(description=_CONTEXTS)]
    context: Number = 512
    interference: Annotated[float, Meta(ge=1)] = 1.0
    shape: str = ""

    def __post_init__(self) -> None:
        check_struct(self)
        contexts = [context for context, _ in self.costs]
        if not contexts or contexts != sorted(set(contexts)):
            raise ConfigError(_CONTEXTS)
        for index, (context, cost) in enumerate(self.costs):
            for kind in KINDS_OF_WORK:
                at = next((n for n, (_, seconds) in enumerate(getattr(cost, kind)) if not seconds > 0), None)
                if at is not None:
                    count, seconds = getattr(cost, kind)[at]
                    raise ConfigError(
                        f"costs[{index}].{kind}[{at}]: a step of {count} takes {seconds!r} s at context {context:g}, "
                        "and a measured time is above 0: profile again"
                    )

    @classmethod
    @check_call
    def from_samples(
        cls,
        contexts: Mapping[Count, Mapping[str, Mapping[Whole, Number]]],
        *,
        model: str,
        device: str,
        dtype: str,
        source: str = "measured",
    ) -> CostTables:
        """Build tables from seconds by context, kind ("decodes", "prefill", "media") and count.

        Noise is removed from each kind. A kind that was not measured at a context costs what it costs at the next
        shorter one. Media are looked up at the shortest context only: their cost does not depend on it. Raises
        ``ConfigError`` as ``StepCost.from_samples``.
        """
        costs: list[tuple[float, StepCost]] = []
        known: dict[str, Mapping[int, float]] = {}
        for context in sorted(contexts):
            known |= {kind: seconds for kind, seconds in contexts[context].items() if seconds}
            costs.append((context, StepCost.from_samples(**known)))
        return cls(model=model, device=device, dtype=dtype, source=source, costs=tuple(costs))

    @classmethod
    def profile(
        cls,
        probe: CostProbe,
        *,
        model: str,
        device: str,
        dtype: str,
        contexts: Sequence[int] = PROFILE_CONTEXTS,
        rows: Sequence[int] = PROFILE_ROWS,
        tokens: Sequence[int] = PROFILE_TOKENS,
        images: Sequence[int] = PROFILE_IMAGES,
        repeats: int = 3,
    ) -> CostTables:
        """Profile a live instance by stage, batch and context: the median of ``repeats`` runs after a warm-up.

        Leaves out what does not fit: prompts longer than the KV pool, more images than the image cache holds. Raises
        ``ConfigError`` where that leaves nothing to measure.
        """
        known = sorted({min(context, probe.longest) for context in contexts if context > 0})
        if not known or repeats < 1:
            raise ConfigError(
                f"give contexts of at least 1 token and at least 1 repeat, got {contexts!r} and {repeats}"
            )
        found: dict[int, dict[str, dict[int, float]]] = {context: {} for context in known}

        def seconds(run: Callable[[], float]) -> float:
            run()
            return median(run() for _ in range(repeats))

        does = roles_of(probe.letters)
        for context, kinds in found.items():
            if does.decodes:
                kinds["decodes"] = {n: seconds(partial(probe.decode, n, context)) for n in rows}
            if does.prefills:
                room = [n for n in tokens if n + context <= probe.longest]
                kinds["prefill"] = {n: seconds(partial(probe.prefill, n, context)) for n in room}
        if does.encodes:
            each = probe.image_tokens
            room = [n for n in images if n <= probe.most_images()]
            found[known[0]]["media"] = {n * each: seconds(partial(probe.encode, n)) for n in room}
        if not any(seen for kinds in found.values() for seen in kinds.values()):
            raise ConfigError(
                "nothing could be measured: none of these steps fits the instance; enlarge its pools or profile "
                "smaller steps"
            )
        return cls.from_samples(found, model=model, device=device, dtype=dtype, source="profiled on a live instance")

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        """Seconds of one step with these rows at the mean ``context``; prefills start at their first token."""
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
        image_tokens: float = 0.0,
    ) -> float:
        """Seconds as ``Roofline.at``; prefills depend on ``prefilled`` alone, media on none of these."""
        language = self._interpolate(context, lambda cost: cost.seconds(decodes, 0, 0))
        prefill = self._interpolate(prefilled, lambda cost: cost.seconds(0, prefill_tokens, 0))
        both = self.costs[0][1].seconds(decodes, prefill_tokens, 0)
        shared = self.costs[0][1].seconds(decodes, 0, 0) + self.costs[0][1].seconds(0, prefill_tokens, 0) - both
        together = max(language, prefill, language + prefill - shared)  # noise: what is shared may exceed both
        return together + self.costs[0][1].seconds(0, 0, media_tokens)

    def _interpolate(self, context: float, seconds: Callable[[StepCost], float]) -> float:
        costs = self.costs
        place = next((n for n, (known, _) in enumerate(costs) if known >= context), len(costs) - 1)
        high = seconds(costs[place][1])
        if place == 0 or len(costs) == 1:
            return high
        low = seconds(costs[place - 1][1])
        (near, _), (far, _) = costs[place - 1], costs[place]
        return low + max(0.0, high - low) * (context - near) / (far - near)

    def save(self, path: str | Path) -> None:
        """Write the tables as JSON; the file names model, device and dtype."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: str | Path, *, model: str | None = None, device: str | None = None) -> CostTables:
        """Read tables that ``save`` wrote. Raises ``ConfigError`` for other files, models or devices."""
        try:
            found = msgspec.json.decode(read_regular_file(path), type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"{name_file(path)} holds no measured costs of trinity: {error}") from error
        for name, wanted, has in (("model", model, found.model), ("device", device, found.device)):
            if wanted is not None and wanted != has:
                raise ConfigError(
                    f"{name_file(path)} was measured on {name} {show(has)}, not on {show(wanted)}: profile again"
                )
        return found
