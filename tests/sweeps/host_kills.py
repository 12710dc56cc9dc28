"""Instances, launchers and whole commands of two hosts without Ray killed under load, and the network between cut.

    python tests/sweeps/host_kills.py [KILLS [MODEL]]        50 by default; as root, for namespaces

A pipeline serves three requests at a time, of an emulated model, or with any MODEL of a tiny LLaVA in float32, whose
launchers import torch. The hosts are network and process namespaces of this machine; blocks go by NIXL between them,
control channels in TLS. After each kill the pipeline has to be whole again; every answer is compared with what is
right, for the LLaVA with ``generate()``; every other end is an error of trinity's. Prints a line for each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import namespaces
from support.asked_pipeline import RIGHT
from support.asked_program import check_told, make_wanted
from support.certificates import make_certificates
from support.checkpoint_files import checkpoint
from support.host_spaces import HostSpaces, host_spaces

KINDS = ("instance", "instance", "launcher", "instance", "command", "two instances", "both commands", "network")
PLACEMENT = "2E1P2D"  # P and D on the first host, E on the second
LATEST_KILL_S = 1.0  # after the last came back
CUT_S = 12.0  # of the network: longer than the pipeline's silence_s
NOTICED_S = 60.0  # for the program to hear of a loss


def strike(hosts: HostSpaces, kind: str, draw: random.Random) -> list[int]:
    """Kill one of a kind, or two, wherever they are; return their processes. Commands are started again at once.

    The network comes back by itself.
    """
    numbers = [0, 1] if kind.endswith("s") else [draw.randrange(2)]
    if kind == "network":
        hosts.cut(CUT_S)
        return []
    victims = []
    for number in numbers:
        command = hosts.commands[number]
        if "command" in kind:
            victims.append(command.own())
        else:
            victims.append(command.launcher() if kind == "launcher" else draw.choice(command.instances()))
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    if "command" in kind:
        for number in numbers:
            hosts.start_again(number)
    return victims


def wait_for_loss(hosts: HostSpaces, epochs: dict[str, int], wanted: list[int], kind: str) -> Counter[str]:
    """Ask the program until it has heard of the loss; return its answers and errors until then.

    A network that is cut for less than a first step may take, whose time nobody knows yet, is no loss.
    """
    counted, until = Counter[str](), time.monotonic() + (CUT_S if kind == "network" else NOTICED_S)
    while True:
        told = hosts.ask("on")
        counted.update({"answers": check_told(told, wanted), **told["errors"]})
        if {name: epoch for name, (_, epoch, _) in told["health"].items()} != epochs:
            return counted
        if time.monotonic() > until:
            assert kind == "network", "nothing was lost"
            return counted
        time.sleep(0.02)


def run(kills: int, seed: int, folder: Path, kinds: tuple[str, ...] = KINDS, *, emulated: bool = True) -> Counter[str]:
    """Kill so often; return how many answers, errors by name, and kills by kind there were."""
    draw, counted, took = random.Random(seed), Counter[str](), dict[str, list[float]]()
    wanted = list(RIGHT) if emulated else make_wanted()
    words = ["--emulated"] if emulated else ["--model", str(checkpoint("llava"))]
    tls = make_certificates(folder)
    with host_spaces(folder, PLACEMENT, tls, *words) as hosts:
        for number in range(2):
            hosts.until_listening(number)
        hosts.run("emulated" if emulated else checkpoint("llava"), tls)
        told = hosts.ask("up")
        check_told(told, wanted)
        assert {(kind, scheme) for kind, _, _, scheme in told["ways"]} == {("image", "nixl"), ("kv", "shm")}
        for number in range(kills):
            time.sleep(draw.uniform(0, LATEST_KILL_S))
            epochs = {name: epoch for name, (_, epoch, _) in told["health"].items()}
            kind = kinds[number % len(kinds)]
            began, victims = time.monotonic(), strike(hosts, kind, draw)
            lost = kind != "launcher"  # whose death ends no instance
            before = wait_for_loss(hosts, epochs, wanted, kind) if lost else Counter[str]()
            told = hosts.ask("up")
            same = epochs == {name: epoch for name, (_, epoch, _) in told["health"].items()}
            assert same != lost or kind == "network", (kind, epochs, told["health"])
            counted["cuts without a loss"] += same and kind == "network"
            seconds, answers = time.monotonic() - began, check_told(told, wanted)
            took.setdefault(kind, []).append(seconds)
            counted.update({"kills": 1, kind: 1, "answers": answers, **told["errors"]})
            counted.update(before)
            errors = dict(Counter(told["errors"]) + before - Counter(answers=before["answers"]))
            print(f"{number + 1}: {kind} {victims}: whole after {seconds:.1f} s, "
                  f"{answers + before['answers']} exact, {errors}", flush=True)  # fmt: skip
        assert hosts.end() == 0
    assert 2 * counted["cuts without a loss"] <= counted["network"], "most cuts fall into no first step"
    for kind, found in took.items():
        median, most = sorted(found)[len(found) // 2], max(found)
        print(f"{kind:16} {len(found):3} times, whole again after {median:.1f} s at the median, {most:.1f} s at most")
    return counted


def main() -> None:
    if namespaces.missing():
        raise SystemExit(namespaces.missing())
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        print(dict(run(kills, 16, Path(folder), emulated=len(sys.argv) < 3)))


if __name__ == "__main__":
    main()
