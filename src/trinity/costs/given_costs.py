"""Reads costs as a user gives them, and checks that measured tables are of what is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trinity.costs.engines import ENGINES
from trinity.costs.model_shape import MODELS, ModelShape
from trinity.costs.step_cost import DEVICES, CostModel, CostTables, Device
from trinity.errors import ConfigError, show, warn_caller
from trinity.stage_kinds import KINDS_OF_WORK, all_letters, stage_of

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
    given: CostModel | Mapping[str, CostModel] | None,
    model: ModelShape,
    devices: Sequence[Device],
    stages: str | None = None,
) -> None:
    """Check that measured tables are of this model and these devices, with seconds of all ``stages`` (None: all).

    Tables of a device that is in ``DEVICES`` stand for no other of them; those of one that is not stand for any, whose
    memory a plan then takes. Raises ``ConfigError``.
    """
    for name, where, tables in _list_tables(given, devices):
        _check_kinds(tables, model, where, all_letters() if stages is None else stages)
        _check_origin(tables, model, name, where)


def warn_of_dtypes(
    given: CostModel | Mapping[str, CostModel] | None, model: ModelShape, devices: Sequence[Device]
) -> None:
    """Warn (``TrinityWarning``) of tables that were measured in a dtype of another size than the model's."""
    for _, where, tables in _list_tables(given, devices):
        size = _DTYPE_BYTES.get(tables.dtype.removeprefix("torch."), model.dtype_bytes)
        if size != model.dtype_bytes:
            warn_caller(
                f"{where} was measured in {tables.dtype}, and the plan is of {model.dtype_bytes} bytes a number: "
                "profile in the dtype that will serve",
            )


def _list_tables(
    given: CostModel | Mapping[str, CostModel] | None, devices: Sequence[Device]
) -> Iterator[tuple[str, str, CostTables]]:
    """List the measured tables of these devices: the device's name, where they were given, the tables."""
    for name in dict.fromkeys(device.name for device in devices):
        tables = given.get(name) if isinstance(given, Mapping) else given
        if isinstance(tables, CostTables):
            yield name, f"cost[{show(name)}]" if isinstance(given, Mapping) else "cost", tables


def _check_kinds(tables: CostTables, model: ModelShape, where: str, stages: str) -> None:
    done = {stage_of(letter).work for letter in stages}
    needed = [kind for kind in KINDS_OF_WORK if kind in done and (kind != "media" or model.encoder)]
    first, missing = tables.costs[:1], []
    for kind in needed:  # media are looked up at the shortest context only
        if not all(getattr(cost, kind) for _, cost in (first if kind == "media" else tables.costs)):
            missing.append(kind)
    if missing:
        raise ConfigError(
            f"{where} has no {' and '.join(missing)} seconds, and stages {stages} of {show(model.name)} need "
            f"{', '.join(needed)}; profile an instance of every stage (await pipe.profile())"
        )


def _check_origin(tables: CostTables, model: ModelShape, device: str, where: str) -> None:
    other = tables.model in MODELS and model.name in MODELS and tables.model != model.name
    if other or (tables.shape and tables.shape != model.outline):
        measured = f"{show(tables.model)} ({show(tables.shape)})" if tables.shape else show(tables.model)
        raise ConfigError(
            f"{where} was measured on model {measured}, not on {show(model.name)} ({model.outline}): profile this "
            "model, or plan that one"
        )
    words = f" {tables.device.replace('-', ' ')} "  # such as "NVIDIA A100-SXM4-80GB"; a CPU's tables stand for any
    named = [name for name, known in DEVICES.items() if f" {name} " in words and known.engine in ENGINES]
    if named and device in DEVICES and device not in named:
        raise ConfigError(
            f"{where} was measured on device {show(tables.device)}, not on {show(device)}: give device={named[0]!r}, "
            "or profile there"
        )
