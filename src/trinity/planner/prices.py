"""Tells what a plan was priced with: the engine assumed on each kind of device, and the seconds of a few steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from trinity.costs.step_cost import CostModel, CostTables, Device, Roofline
from trinity.planner.algorithm2 import Workload, stage_seconds

PRICED_ROWS = 32  # of the decode step that a plan prints


class PricedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that steps were assumed to take on a device.

    - ``device``, ``engine``: by name; "measured" where tables of measurements price them, ``source`` says which.
    - ``decode_s`` (s): of ``PRICED_ROWS`` rows at the trace's mean ``context`` (tokens).
    - ``prefill_s`` (s): of one mean ``prompt`` (tokens).
    - ``encode_s`` (s): of one mean ``image`` (visual tokens); 0 where there is none.
    """

    device: str
    engine: str
    source: str
    context: int
    decode_s: float
    prompt: int
    prefill_s: float
    image: int = 0
    encode_s: float = 0.0


def price_steps(device: Device, cost: CostModel, load: Workload) -> PricedSteps:
    """Price one decode, prefill and encode of a trace on a device."""
    encode, prefill, decode = stage_seconds(load, cost)
    prompt, image = max(1, round(load.mean_prompt)), round(load.image)
    engine, source = name_engine(device, cost)
    return PricedSteps(
        device=name_measured(device, cost),
        engine=engine,
        source=source,
        context=round(load.context),
        decode_s=decode(PRICED_ROWS),
        prompt=prompt,
        prefill_s=prefill(prompt),
        image=image,
        encode_s=encode(image) if image else 0.0,
    )


def name_engine(device: Device, cost: CostModel) -> tuple[str, str]:
    """Name the engine that a cost model assumes, and where its seconds come from."""
    if isinstance(cost, Roofline):
        here = cost.device
        return here.engine, f"a roofline with {1000 * here.pass_s:g} ms a pass"
    if isinstance(cost, CostTables):
        return "measured", f"tables {cost.source}"
    return "given", f"a {type(cost).__name__}"


def name_measured(device: Device, cost: CostModel) -> str:
    """Name the device whose steps these are: that of the measurements, where there are some."""
    return cost.device if isinstance(cost, CostTables) else device.name


def label_devices(devices: Mapping[str, Device], costs: Mapping[str, CostModel]) -> dict[str, str]:
    """Label each kind of device as a plan prints it: by where its steps were measured, if they were, else by its name.

    Kinds that would share a label are told apart by what is their own: "AMD EPYC (memory of H100)".
    """
    measured = {name: name_measured(device, costs[name]) for name, device in devices.items()}
    kinds = Counter(measured.values())
    return {
        name: f"{label} (memory of {name})" if kinds[label] > 1 and label != name else label
        for name, label in measured.items()
    }


def list_prices(priced: Iterable[PricedSteps]) -> list[str]:
    """List the sentences on each kind of device, equal ones once."""
    return list(dict.fromkeys(map(describe_prices, priced)))


def describe_prices(priced: PricedSteps) -> str:
    """Return one sentence: the engine assumed, and the seconds that it prices."""
    steps = [f"a decode of {PRICED_ROWS} requests at {priced.context:,} tokens {format_ms(priced.decode_s)}"]
    steps.append(f"a prefill of {priced.prompt:,} tokens {format_ms(priced.prefill_s)}")
    if priced.image:
        steps.append(f"an encode of {priced.image:,} visual tokens {format_ms(priced.encode_s)}")
    return f"Engine assumed on {priced.device}: {priced.engine} ({priced.source}): {', '.join(steps)}."


def format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def iter_borrowed(devices: dict[str, Device], costs: dict[str, CostModel]) -> Iterator[str]:
    """Yield a note for each device whose steps were measured elsewhere: it gives its memory alone."""
    for name, device in devices.items():
        measured = name_measured(device, costs[name])
        if measured != name:
            yield f"Steps are those measured on {measured}; only the memory is that of {name}."
