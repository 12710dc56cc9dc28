"""Actors, raylets, launchers, instances and drivers of a Ray cluster of two hosts killed under load.

    python tests/sweeps/ray_kills.py [KILLS [MODEL]]          50 by default; as root, where ray is installed

A pipeline serves three requests at a time, of an emulated model, or with any MODEL of a tiny LLaVA in float32, whose
launchers import torch: then a kill takes a minute. After each the pipeline has to come back; every answer is compared
with what is right, for the LLaVA with ``generate()``; every other end is an error of trinity's. Prints a line for each.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.checkpoint_files import checkpoint
from support.ray_cluster import WARM_UP_BYTES
from support.ray_hosts import RayHosts, check_told, find_processes, make_certificates, make_wanted, missing, ray_hosts
from support.ray_program import RIGHT

KINDS = ("actor", "actor", "actor", "raylet", "raylet", "launcher", "instance", "driver")
MOST_PROCESSES = 1000  # of Ray's, in a sweep: each puts a few bytes into the store
LATEST_KILL_S = 1.0  # after the last came back


def strike(hosts: RayHosts, kind: str, draw: random.Random) -> str:
    """Kill one of a kind, wherever it is; return what it was."""
    if kind == "raylet":  # of the host that the program is not on, with all that runs there
        hosts.nodes[1].close()
        return "the second host's raylet"
    if kind == "driver":
        [victim] = find_processes("trinity.remote.ray.ray_driver")
    else:
        word = "ray::HostActor" if kind == "actor" else "trinity.remote.fork_server"
        found = [each for node in hosts.nodes for each in node.processes(word)]
        launchers = [each for each in found if parent_of(each) not in found]
        victim = draw.choice(found if kind == "actor" else launchers if kind == "launcher" else
                             [each for each in found if each not in launchers])  # fmt: skip
    hosts.nodes[0].kill_one(victim)
    return f"process {victim}"


def parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def run(kills: int, seed: int, folder: Path, kinds: tuple[str, ...] = KINDS, *, emulated: bool = True) -> Counter[str]:
    """Kill so often; return how many answers, errors by name, and kills by kind there were."""
    draw, counted = random.Random(seed), Counter[str]()
    wanted = list(RIGHT) if emulated else make_wanted()
    with ray_hosts((1, 2)) as hosts:  # E on the first; P and D, which exchange KV, on the second
        hosts.run("emulated" if emulated else checkpoint("llava"), make_certificates(folder))
        check_told(hosts.ask("up"), wanted)
        for number in range(kills):
            time.sleep(draw.uniform(0, LATEST_KILL_S))
            kind = kinds[number % len(kinds)]
            what, began = strike(hosts, kind, draw), time.monotonic()
            if kind == "raylet":
                hosts.join_again()
            told = hosts.ask("up")
            answers = check_told(told, wanted)
            counted.update({"answers": answers, "kills": 1, kind: 1, **told["errors"]})
            epochs = {name: epoch for name, (_, epoch, _) in told["health"].items()}
            seen = f"{answers} exact, {told['errors']}, epochs {epochs}"
            print(f"{number + 1}: {kind} ({what}): back after {time.monotonic() - began:.1f} s, {seen}", flush=True)
        stored = hosts.cluster.stored_bytes()
        assert stored <= MOST_PROCESSES * WARM_UP_BYTES, stored
        assert hosts.end() == 0
    return counted


def main() -> None:
    if missing():
        raise SystemExit(missing())
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        print(dict(run(kills, 16, Path(folder), emulated=len(sys.argv) < 3)))


if __name__ == "__main__":
    main()
