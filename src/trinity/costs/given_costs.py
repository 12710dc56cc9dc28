"""Reads costs as a user gives them, and checks that measured tables are of what is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trinity.costs.engines import ENGINES
from trinity.costs.model_shape import MODELS, ModelShape
from trinity.costs.step_cost import DEVICES, KINDS_OF_WORK, CostModel, CostTables, Device
from trinity.errors import ConfigError, warn_caller

GivenCosts = CostModel | str | Path | Mapping[str, CostModel | str | Path] | None


def load_costs(given: GivenCosts) -> CostModel | Mapping[str, CostModel] | None:
    """Return costs with the tables of each path in its place. Raises ``ConfigError`` for a file that has none."""
    if isinstance(given, Mapping):
        return {name: _load(each) for name, each in given.items()}
    return None if given is None else _load(given)


def _load(given: CostModel | str | Path) -> CostModel:
    return CostTables.load(given) if isinstance(given, str | Path) else given


_DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def check_costs(
    given: CostModel | Mapping[str, CostModel] | None, model: ModelShape, devices: Sequence[Device]
) -> None:
    """Check that measured tables are of this model and these devices, with seconds for all the work of a plan.

    Tables of a device that is in ``DEVICES`` stand for no other of them; those of one that is not stand for any, whose
    memory a plan then takes. Raises ``ConfigError``; warns (``TrinityWarning``) where the dtype has another size.
    """
    for device in devices:
        tables = given.get(device.name) if isinstance(given, Mapping) else given
        if isinstance(tables, CostTables):
            _check_tables(tables, model, device, f"cost[{device.name!r}]" if isinstance(given, Mapping) else "cost")


def _check_tables(tables: CostTables, model: ModelShape, device: Device, where: str) -> None:
    needed = KINDS_OF_WORK if model.encoder else KINDS_OF_WORK[:2]
    first, missing = tables.costs[:1], []
    for kind in needed:  # media are looked up at the shortest context only
        if not all(getattr(cost, kind) for _, cost in (first if kind == "media" else tables.costs)):
            missing.append(kind)
    if missing:
        raise ConfigError(
            f"{where} has no {' and '.join(missing)} seconds, and a plan of {model.name} needs {', '.join(needed)}; "
            "profile an instance of every stage (await pipe.profile())"
        )
    other = tables.model in MODELS and model.name in MODELS and tables.model != model.name
    if other or (tables.shape and tables.shape != model.outline):
        measured = f"{tables.model} ({tables.shape})" if tables.shape else tables.model
        raise ConfigError(
            f"{where} was measured on model {measured}, not on {model.name} ({model.outline}): profile this model, or "
            "plan that one"
        )
    words = f" {tables.device.replace('-', ' ')} "  # such as "NVIDIA A100-SXM4-80GB"; a CPU's tables stand for any
    named = [name for name, known in DEVICES.items() if f" {name} " in words and known.engine in ENGINES]
    if named and device.name in DEVICES and device.name not in named:
        raise ConfigError(
            f"{where} was measured on device {tables.device}, not on {device.name}: give device={named[0]!r}, or "
            "profile there"
        )
    size = _DTYPE_BYTES.get(tables.dtype.removeprefix("torch."), model.dtype_bytes)
    if size != model.dtype_bytes:
        warn_caller(
            f"{where} was measured in {tables.dtype}, and the plan is of {model.dtype_bytes} bytes a number: profile "
            "in the dtype that will serve",
        )
