"""Ray driver: the process that speaks with Ray for a pipeline, which itself has nothing of Ray in it.

Ray's library ends its process where it loses the cluster's head for long. So it runs here: the pipeline loses nothing
by that, and starts another driver once it needs one. It speaks JSON lines. The first on stdin is {"address",
"bundles", "strategy", "threads", "timeout_s"}; {"id", "begin"} or {"id", "end"} are orders, with the number of their
bundle. On stdout are {"ready"} or {"failed", "kind"}, and {"id", ...} for each order. It ends when stdin ends, and
everything that it has begun with it, as is Ray's rule for a driver that has ended however.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from trinity.remote.ray.ray_bundles import HostBundle, explain_shortage
from trinity.remote.ray.ray_host import HostActor, end_process

logger = logging.getLogger("trinity")
ANSWER_S = 5.0  # for the head to answer a question
RESTART_S = 10.0  # for an actor to be started again, which takes Ray a second or two
FENCE_S = 18.0  # for a process to be started on a node, and to find another one there
ACTORS_CLOSE_S = 5.0  # for all actors to end their instances
HEAD_GONE_S = "604800"  # for which Ray's library in this process waits for a lost head before it ends the process
Answer = dict[str, Any]


class RayDriver:
    """Holds a placement group, and an actor in each of its bundles, for as long as this process lives."""

    def __init__(self, config: Answer) -> None:
        self._config = config
        self._bundles = [HostBundle(tuple(names), resources) for names, resources in config["bundles"]]
        self._group: Any = None
        self._actors: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ the start

    def open(self) -> Answer:
        """Join the cluster and start an actor in each bundle. Blocks; returns the address of each bundle's host."""
        import ray
        from ray.util.placement_group import placement_group

        try:
            _check_head(self._config["address"])
            ray.init(self._config["address"], log_to_driver=False, configure_logging=False, logging_level="ERROR")
        except Exception as error:
            return {"failed": _explain_no_cluster(self._config["address"], error), "kind": "PeerLost"}
        self._group = placement_group([each.resources for each in self._bundles], strategy=self._config["strategy"])
        if not self._group.wait(self._config["timeout_s"]):
            nodes = {each["NodeManagerAddress"]: each["Resources"] for each in ray.nodes() if each["Alive"]}
            return {"failed": explain_shortage(self._bundles, nodes), "kind": "ConfigError"}
        self._actors = [self._start_actor(number) for number in range(len(self._bundles))]
        return {"ready": True}

    def _start_actor(self, number: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._bundles[number].resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
        }
        return ray.remote(HostActor).options(**options).remote(self._config["threads"])

    # ------------------------------------------------------------ orders

    async def serve(self, orders: asyncio.StreamReader) -> None:
        """Carry out orders, many at once, until there are no more; then end all that was begun."""
        while line := await orders.readline():
            task = asyncio.ensure_future(self._carry_out(json.loads(line)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for task in list(self._tasks):
            task.cancel()
        await self._close()

    async def _carry_out(self, order: Answer) -> None:
        work = self._begin if "begin" in order else self._end
        try:
            answer = await work(order)
        except TimeoutError:
            answer = {"error": f"Ray's host of {order['name']} gave no answer in time", "kind": "PeerLost"}
        except Exception as error:  # of Ray, whose kinds are many: each is this order's alone
            answer = {"error": f"Ray's host of {order['name']} does not answer: {_shorten(error)}", "kind": "PeerLost"}
        write_line({"id": order["id"], **answer})

    async def _begin(self, order: Answer) -> Answer:
        from ray.exceptions import ActorDiedError

        given = (order["name"], order["epoch"], bytes.fromhex(order["secret"]), order["model"], order["tls"])
        number = order["begin"]
        try:
            begun = self._actors[number].begin.remote(*given)
            found: Answer = await asyncio.wait_for(begun, self._config["timeout_s"])
        except ActorDiedError:  # not lost but given up by Ray, as where trinity could not be imported
            self._actors[number] = self._start_actor(number)
            raise
        return found

    async def _end(self, order: Answer) -> Answer:
        """Have the actor end a life; where it is on another node by now, or away, look on the node that had it."""
        number, process = order["end"], (order["process"], order["born"])
        known = False
        if number is not None:
            reference = self._actors[number].end.remote(order["name"], order["epoch"], *process, order["node"])
            with suppress(Exception):
                known = await asyncio.wait_for(reference, RESTART_S)
        if not known and order["process"] is not None:
            await asyncio.wait_for(asyncio.to_thread(_fence, order["node"], *process), FENCE_S)
        return {"ended": True}

    async def _close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        closing = [actor.close.remote() for actor in self._actors]
        with suppress(Exception):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), ACTORS_CLOSE_S)
        with suppress(Exception):
            await asyncio.wait_for(asyncio.to_thread(remove_placement_group, self._group), ANSWER_S)
        with suppress(Exception):
            await asyncio.wait_for(asyncio.to_thread(ray.shutdown), ANSWER_S)


def _fence(node: str, process: int, born: int | None) -> None:
    """Return once a process has ended that ran on this node of Ray's; one that has died has none. Blocks."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if any(each["NodeID"] == node and each["Alive"] for each in ray.nodes()):
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        ray.get(task.remote(process, born), timeout=FENCE_S)


def _check_head(address: str) -> None:
    """Raise ``OSError`` where nobody listens: Ray's library would try for more than a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


def _explain_no_cluster(address: str, error: Exception) -> str:
    where = "no Ray cluster is known here" if address == "auto" else f"no Ray cluster answers at {address}"
    return (
        f"{where} ({_shorten(error)}): start one with `ray start --head`, join this host to it with `ray start "
        "--address=HEAD:6379`, and give RaySupply its address= if it is not this host's"
    )


def _shorten(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


_answers = 1


def write_line(message: Answer) -> None:
    """Write one JSON line to what stdout was."""
    os.write(_answers, json.dumps(message).encode() + b"\n")


async def run() -> None:
    """Serve the pipeline at the other end of stdin and stdout."""
    orders = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    driver = RayDriver(json.loads(await orders.readline()))
    opened = driver.open()  # on the main thread, where Ray's library sets its handler of SIGTERM
    write_line(opened)
    if "ready" in opened:
        await driver.serve(orders)
    os._exit(0)  # threads of Ray's that wait for a lost head would be waited for


def main() -> None:
    """Keep stdout for answers: what Ray prints goes to stderr. Never returns."""
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pipeline's program, which ends what it started
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", HEAD_GONE_S)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    asyncio.run(run())


if __name__ == "__main__":
    main()
