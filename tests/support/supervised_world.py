"""Processes, launchers and channels in virtual time around a SupervisorCore: what may be killed, frozen or cut."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from trinity.core.messages import Tick
from trinity.remote.supervision.supervisor_core import SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    Begin,
    CloseAll,
    Down,
    Ended,
    Event,
    Fence,
    Introduce,
    Launch,
    Leaving,
    Linked,
    Loaded,
    Lost,
    NextLoaded,
    NextLost,
    Proceed,
    Quiet,
    Removed,
    Separate,
    Suspect,
    Unlinked,
    Up,
)

Life = tuple[str, int]
LOAD_S, SHORT_S, STUCK_S, HEARTBEAT_S = 1.5, 0.2, 3.0, 0.5


@dataclass
class Process:
    """One life: what it knows, and what was sent to it that it has not read. ``waits``: it has no pool yet.

    ``step``: when the long step began that it has announced, and its predicted seconds.
    """

    life: Life
    alive: bool = True
    frozen: bool = False
    waits: bool = False
    ready: bool = False
    unread: list[Callable[[], None]] = field(default_factory=list)
    wants: set[Life] = field(default_factory=set)
    linked: set[Life] = field(default_factory=set)
    heard: float = 0.0
    step: tuple[float, float] | None = None


class World:
    """Carries out commands with delays drawn from a seed; ``strike`` and ``hold`` are the faults.

    Checks at each command that no two lives of a name run at once, but for one that waits for the word to go on, that
    of those there is one, and that the front end hears of each in turn.
    """

    def __init__(self, names: str, seed: int, by_hand: str = "", silence_s: float = 20.0) -> None:
        self.core = SupervisorCore(list(names), list(by_hand), silence_s)
        self.draw, self.by_hand = random.Random(seed), by_hand
        self.now, self.steps = 0.0, 0
        self._order, self._queue = count(), list[tuple[float, int, Callable[[], None]]]()
        self.processes: dict[Life, Process] = {}
        self.launcher = "alive"  # or "frozen", "dead": until the next launch notices
        self.up: dict[str, int] = {}
        self.told: list[Event] = []
        self._tick_at: float | None = None
        self._fifo: dict[object, float] = {}
        self.tell(Begin())

    # ------------------------------------------------------------ time

    def later(self, seconds: float, do: Callable[[], None], channel: object = None) -> None:
        at = self.now + seconds
        if channel is not None:  # what goes one way between two stays in order
            at = self._fifo[channel] = max(at, self._fifo.get(channel, 0.0))
        heapq.heappush(self._queue, (at, next(self._order), do))

    def soon(self, do: Callable[[], None], channel: object = None) -> None:
        self.later(self.draw.uniform(0.0, SHORT_S), do, channel)

    def step(self) -> bool:
        """Let the next thing happen; False where nothing is left but heartbeats."""
        if not self._queue:
            return False
        self.now, _, do = heapq.heappop(self._queue)
        self.steps += 1
        do()
        return True

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self._queue and self._queue[0][0] <= until and not done():
            self.step()

    def tell(self, event: Event | Tick) -> None:
        for command in self.core.handle(event, self.now):
            self._carry_out(command)
        due = self.core.next_timer()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self.later(max(0.0, due - self.now), self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        self.tell(Tick())

    # ------------------------------------------------------------ commands

    def _carry_out(self, command: Event) -> None:
        if isinstance(command, Launch):
            self._launch(command)
        elif isinstance(command, Proceed):
            self._proceed((command.name, command.epoch))
        elif isinstance(command, Fence):
            self._fence((command.name, command.epoch))
        elif isinstance(command, (Introduce, Separate)):
            self._send((command.name, command.epoch), command)
        else:
            self._hear(command)

    def _launch(self, command: Launch) -> None:
        life = (command.name, command.epoch)
        assert not self.core.closing
        assert life not in self.processes, f"{life} twice"
        self._check_alone(life, command.waits)
        process = self.processes[life] = Process(life, waits=command.waits)
        if self.launcher != "alive" and life[0] not in self.by_hand:
            process.alive = False
            self.later(STUCK_S if self.launcher == "frozen" else 0.0, lambda: self._replace_launcher(life))
            return
        process.heard = self.now
        self.later(HEARTBEAT_S, lambda: self._beat(process))
        self.later(self.draw.uniform(0.1, LOAD_S), lambda: self._does(process, lambda: self._load(process)))

    def _replace_launcher(self, life: Life) -> None:
        """Have a launch fail by its launcher, which is replaced then."""
        self.launcher = "alive"
        self.tell(Lost(*life, "no launcher"))

    def _check_alone(self, life: Life, waits: bool) -> None:
        """Check that what has pools has them alone, and that one waits at most, beside those that are being ended."""
        member = self.core.members[life[0]]
        others = [each for each in self.processes.values() if each.life[0] == life[0] and each.life != life]
        beside = [
            each for each in others if each.alive and each.waits == waits and each.life[1] not in member.dismissed
        ]
        assert not beside, f"{beside} run beside {life}"

    def _load(self, process: Process) -> None:
        process.ready = True
        self._say(process, NextLoaded(*process.life) if process.waits else Loaded(*process.life))

    def _proceed(self, life: Life) -> None:
        """Give one that waits the word, which may not have loaded yet, or be gone by now."""
        assert not self.core.closing
        self._check_alone(life, waits=False)
        process = self.processes[life]
        process.waits = False
        if process.ready:
            self.soon(lambda: self._does(process, lambda: self._load(process)), ("to", life))

    def _beat(self, process: Process) -> None:
        """Heartbeat and watch in one: how long it has been silent, as the front end sees it."""
        if not process.alive:
            return
        if not process.frozen:
            process.heard = self.now
        at = (self.now - process.step[0], process.step[1]) if process.step is not None else ()
        self.tell(Quiet(*process.life, self.now - process.heard, *at))
        self.later(HEARTBEAT_S, lambda: self._beat(process))

    def _fence(self, life: Life) -> None:
        self.strike(life, told=False)
        self.soon(lambda: self.tell(Ended(*life)))

    def _send(self, life: Life, command: Introduce | Separate) -> None:
        process = self.processes[life]
        self.soon(lambda: self._does(process, lambda: self._obey(process, command)), ("to", life))

    def _obey(self, process: Process, command: Introduce | Separate) -> None:
        peer = (command.peer, command.peer_epoch)
        if isinstance(command, Separate):
            process.wants.discard(peer)
            process.linked.discard(peer)
        else:
            process.wants.add(peer)
            self._connect(process, peer)

    def _connect(self, process: Process, peer: Life) -> None:
        other = self.processes[peer]
        if other.alive and process.alive and process.life in other.wants and peer in process.wants:
            for one, two in ((process, other), (other, process)):
                self.soon(partial(self._does, one, partial(self._link, one, two.life)))

    def _link(self, process: Process, peer: Life) -> None:
        if peer in process.wants:
            process.linked.add(peer)
            self._say(process, Linked(*process.life, *peer))

    def _say(self, process: Process, event: Event) -> None:
        """What was said before the end may be heard or be cut off by it."""
        process.heard = self.now
        self.soon(
            lambda: self.tell(event) if process.alive or self.draw.random() < 0.5 else None, ("from", process.life)
        )

    def _does(self, process: Process, do: Callable[[], None]) -> None:
        if process.frozen:
            process.unread.append(do)
        elif process.alive:
            do()

    def _hear(self, command: Event) -> None:
        self.told.append(command)
        if isinstance(command, Up):
            assert command.name not in self.up, f"{command} twice"
            self.up[command.name] = command.epoch
        elif isinstance(command, Down):
            assert self.up.pop(command.name, command.epoch) == command.epoch
        else:
            assert isinstance(command, (Suspect, Leaving, Removed, NextLost))
            assert not isinstance(command, Removed) or command.name not in self.up
            assert not isinstance(command, Removed) or not self.running(command.name)

    # ------------------------------------------------------------ faults

    def strike(self, life: Life, told: bool = True) -> None:
        """Kill a life. Its peers see their channels end, the front end its own."""
        process = self.processes.get(life)
        if process is None or not process.alive:
            return
        process.alive = process.frozen = False
        process.unread.clear()
        if told:
            self.soon(lambda: self.tell(Lost(*life, "its control channel ended")), ("from", life))
        for other in self.processes.values():
            if life in other.linked:
                self.soon(partial(self._does, other, partial(self._unlink, other, life)))

    def _unlink(self, process: Process, peer: Life) -> None:
        if peer in process.linked:
            process.linked.discard(peer)
            self._say(process, Unlinked(*process.life, *peer))

    def cut(self, one: Life, two: Life) -> None:
        """End the channel of two that go on."""
        for mine, peer in ((one, two), (two, one)):
            process = self.processes.get(mine)
            if process is not None and process.alive:
                process.wants.discard(peer)
                self._does(process, partial(self._unlink, process, peer))

    def hold(self, life: Life) -> None:
        """Freeze a life."""
        process = self.processes.get(life)
        if process is not None and process.alive:
            process.frozen = True

    def release(self, life: Life) -> None:
        process = self.processes.get(life)
        if process is not None and process.frozen:
            process.frozen = False
            unread, process.unread = process.unread, []
            for do in unread:
                self._does(process, do)

    def work(self, life: Life, seconds: float, predicted_s: float) -> None:
        """Begin a step that holds the interpreter of a life for so long."""
        process = self.processes.get(life)
        if process is not None:
            process.step = (self.now, predicted_s)
            self.hold(life)
            self.later(seconds, lambda: self._rest(process))

    def _rest(self, process: Process) -> None:
        process.step = None
        self.release(process.life)

    def end_launcher(self) -> None:
        """Kill the launcher: what it has started lives on, and launches fail until there is another."""
        self.launcher = "dead"

    def hold_launcher(self) -> None:
        self.launcher = "frozen"

    def life(self, name: str) -> Life:
        return (name, self.core.members[name].epoch)

    def next_life(self, name: str) -> Life:
        """The life that is prepared to follow the present one, -1 for none."""
        following = self.core.members[name].next
        return (name, following.epoch if following is not None else -1)

    def running(self, name: str) -> list[Process]:
        """Every process of an instance that is alive, whatever for."""
        return [each for each in self.processes.values() if each.life[0] == name and each.alive]

    # ------------------------------------------------------------ the end

    @property
    def whole(self) -> bool:
        """True where every instance is up, and really there and linked to all others."""
        lives = [self.processes.get(self.life(name)) for name in self.core.members]
        if len(self.up) < len(lives) or any(each is None or not each.alive or each.frozen for each in lives):
            return False
        here = {each.life for each in lives if each is not None}
        return all(each is not None and here - {each.life} <= each.linked for each in lives)

    def close(self) -> None:
        self.tell(CloseAll())
