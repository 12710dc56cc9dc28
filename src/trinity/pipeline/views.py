"""View of a pipeline's instances, as a notebook shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity.core.messages import PeerLoad
from trinity.instance import Instance
from trinity.placement import Placement
from trinity.remote.supervisor_messages import InstanceHealth
from trinity.tables import Table

STAGE_WORDS = {"E": "encode", "P": "prefill", "D": "decode"}


def describe_pipeline(model: str, placement: Placement, state: str, served: int, ended: int) -> str:
    """Describe a pipeline in a line."""
    now = f", {served} served now" if served else ""
    return f"Pipeline({model} on {placement}, {state}{now}, {ended} ended)"


def instance_table(
    instances: Sequence[Instance], loads: Mapping[str, PeerLoad], health: Mapping[str, InstanceHealth]
) -> Table:
    """Tabulate each instance with its stages, its state, the work that waits and the blocks that are free."""
    rows = []
    for each in instances:
        load, life = loads.get(each.name), health.get(each.name)
        waiting = "" if load is None else f"{1e3 * sum(load.predicted_s.values()):.1f} ms"
        free = "" if load is None else ", ".join(f"{count:,} {kind}" for kind, count in load.free.items())
        state = "" if life is None else life.state + (f": {life.why}" if life.why else "")
        rows.append((each.name, ", ".join(STAGE_WORDS[role] for role in each.roles), state, waiting, free))
    columns = ("instance", "stages", "process", "work ahead", "free blocks")
    kept = [at for at, _ in enumerate(columns) if at < 2 or any(row[at] for row in rows)]
    return Table(tuple(columns[at] for at in kept), [tuple(row[at] for at in kept) for row in rows])
