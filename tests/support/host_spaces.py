"""Two hosts of a file of hosts, out of namespaces of this machine, the command of each, and a pipeline's program."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support import paths
from support.asked_program import AskedProgram
from support.host_commands import ENVIRONMENT, HostCommand
from support.namespaces import HostSpace, two_hosts
from support.running_instances import PHOTOS
from trinity.costs.cluster import Cluster
from trinity.remote.hosts.hosts import HostTable, plan_hosts, write_hosts

PROGRAM = paths.TESTS / "support" / "hosts_program.py"
NAMES = ("alpha", "beta")
TLS_WORDS = ("--tls-certificate", "--tls-key", "--tls-authority")


class HostSpaces(AskedProgram):
    """The hosts, their commands, and the program, which runs on the first. ``words``: of each command."""

    def __init__(
        self, spaces: Sequence[HostSpace], folder: Path, placement: str, cluster: Cluster | None, words: Sequence[str]
    ) -> None:
        self.spaces, self.words, self.file = spaces, list(words), folder / "hosts.toml"
        addresses = {name: space.address for name, space in zip(NAMES, spaces, strict=True)}
        self.table: HostTable = plan_hosts(placement, addresses, cluster)
        write_hosts(self.file, self.table)
        self.commands: list[HostCommand] = []
        for number in range(len(spaces)):
            self.commands.append(self.start(number))

    def start(self, number: int) -> HostCommand:
        return HostCommand(self.file, NAMES[number], *self.words, entry=self.spaces[number].entry)

    def until_listening(self, number: int) -> dict[str, str]:
        return self.commands[number].until_listening(len(self.table.list_on(NAMES[number])))

    def start_again(self, number: int) -> None:
        """Start the command of a host anew; what the last had begun has ended by then."""
        self.commands[number].close()
        self.commands[number] = self.start(number)

    def cut(self, seconds: float) -> None:
        """Take the network between the two away for so long."""
        one = self.spaces[1]
        for state in ("down", "up"):
            words = ["ip", "link", "set", one.device, state]
            subprocess.run(["nsenter", f"--target={one.process}", "--net", *words], check=True, capture_output=True)
            time.sleep(seconds if state == "down" else 0.0)

    def run(self, model: Path | str, tls: Sequence[str]) -> None:
        words = [str(PROGRAM), str(self.file), str(model), str(PHOTOS[0]), *tls]
        self.begin([*self.spaces[0].entry, sys.executable, *words], ENVIRONMENT)


@contextmanager
def host_spaces(
    folder: Path, placement: str, tls: Sequence[str], *words: str, cluster: Cluster | None = None
) -> Iterator[HostSpaces]:
    """Two such hosts, their commands started with these certificates; what exchanges KV is on the first."""
    options = [word for pair in zip(TLS_WORDS, tls, strict=True) for word in pair]
    with two_hosts() as spaces:
        made = HostSpaces(spaces, folder, placement, cluster, [*words, *options])
        try:
            yield made
        finally:
            made.kill()
            for command in made.commands:
                command.close()
