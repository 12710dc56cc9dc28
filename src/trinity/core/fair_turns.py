"""FairTurns: the order in which jobs of many clients get places or bytes, so that no client holds all of them."""

from __future__ import annotations

from collections import OrderedDict, deque

MOST_FORMER = 4096  # clients that have gone: 200 bytes each


class FairJob:
    """One job, which waits, runs and ends.

    - ``client``: the name of its client. ``number``: in order of arrival. ``size``: places that it takes, 1 at least.
    - ``held``: it has had its places from the beginning (``FairTurns.start``), and nobody knows for how long.
    """

    __slots__ = ("client", "held", "number", "size")

    def __init__(self, client: str, number: int, size: int) -> None:
        self.client, self.number, self.size, self.held = client, number, size, False


class _Client:
    """A client that has jobs here.

    ``running``: places that they take; ``used``: their cost, on the clock of ``FairTurns``; ``begun``: its last;
    ``paused``: those that have begun and run no more.
    """

    __slots__ = ("begun", "paused", "running", "used", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[FairJob] = deque()
        self.paused: set[FairJob] = set()
        self.running, self.used, self.begun = 0, 0.0, 0


class FairTurns:
    """Queue of jobs for ``places``, of which each job takes one, or several: places may be bytes.

    The next job is of the client whose running ones take the fewest; among these of the one whose jobs have cost least;
    among these of the one that has had no turn for longest. Jobs of one client stay in order, and one that takes many
    places is passed by no other client's while it fits once those that run have ended. One that held jobs leave no room
    for is passed: else a client that holds little, for long, and one that wants all would keep the rest from every
    turn. A client that comes anew has no credit for the time that it was away. So no client gets more than its share of
    the places while others wait, and a newcomer goes before all that were served already, however many they are and
    however many jobs each has.

    Attributes: ``waiting``: number of jobs. ``running``: places that are taken, ``held`` of them by held jobs.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.waiting = self.running = self.held = self._joined = self._begun = 0
        self._clock = 0.0  # the least ``used`` of clients with jobs, as far as it ever was
        self._clients: dict[str, _Client] = {}
        self._former: OrderedDict[str, _Client] = OrderedDict()  # those without a job, the first that left first

    def join(self, client: str, size: int = 1) -> FairJob:
        """Have a job wait for ``size`` places."""
        found = self._clients.get(client)
        if found is None:
            if self._clients:
                self._clock = max(self._clock, min(each.used for each in self._clients.values()))
            found = self._clients[client] = self._former.pop(client) if client in self._former else _Client()
            found.used = max(found.used, self._clock)
        self._joined += 1
        job = FairJob(client, self._joined, size)
        found.waiting.append(job)
        self.waiting += 1
        return job

    def drop(self, job: FairJob) -> bool:
        """End a job that waits or is paused; False if it does neither."""
        found = self._clients.get(job.client)
        if found is None or job not in (*found.waiting, *found.paused):
            return False
        if job in found.paused:
            found.paused.remove(job)
        else:
            found.waiting.remove(job)
            self.waiting -= 1
        self._forget(job.client, found)
        return True

    def take(self) -> FairJob | None:
        """Start the next job, if one waits and there is a place."""
        if self.running >= self.places or not self.waiting:
            return None
        waiting = (each for each in self._clients.values() if each.waiting)
        ready = (
            each
            for each in waiting
            if each.running + len(each.paused) < self.places and self.held + each.waiting[0].size <= self.places
        )
        client = min(ready, key=_rank, default=None)
        if client is None or self.running + client.waiting[0].size > self.places:
            return None
        self.waiting -= 1
        return self._run(client, client.waiting.popleft())

    def start(self, client: str, size: int) -> FairJob:
        """Start a job at once, whether or not there is a place: it has what it takes, and is held until it leaves."""
        job = self.join(client, size)
        self.waiting -= 1
        job.held, self.held = True, self.held + size
        return self._run(self._clients[client], self._clients[client].waiting.pop())

    def _run(self, client: _Client, job: FairJob) -> FairJob:
        client.running, client.begun = client.running + job.size, self._begun + 1
        self._begun, self.running = client.begun, self.running + job.size
        return job

    def pause(self, job: FairJob, cost: float = 0.0) -> None:
        """Give a job's places to other clients until it goes on: it still counts among those that its own may have.

        ``cost``: what it has cost until now, so that it is paid also where the job is dropped.
        """
        found = self._free(job)
        found.used += max(0.0, cost)
        found.paused.add(job)

    def go_on(self, job: FairJob) -> None:
        """Have a paused job wait for its places, before all others of its client."""
        found = self._clients[job.client]
        found.paused.remove(job)
        found.waiting.appendleft(job)
        self.waiting += 1

    def resize(self, job: FairJob, size: int) -> None:
        """Have a job that runs take so many places from now on, whether or not there are as many."""
        more = size - job.size
        job.size, self.running = size, self.running + more
        self.held += more if job.held else 0
        self._clients[job.client].running += more

    def count(self, client: str) -> int:
        """Count the places that a client's jobs take."""
        return self._clients[client].running if client in self._clients else 0

    def leave(self, job: FairJob, cost: float) -> None:
        """End a job that ran. ``cost``: what it cost, in one unit for all jobs."""
        found = self._free(job)
        found.used += max(0.0, cost)
        self._forget(job.client, found)

    def _free(self, job: FairJob) -> _Client:
        """Take back the places of a job that ran, and return its client."""
        found = self._clients[job.client]
        found.running, self.running = found.running - job.size, self.running - job.size
        self.held -= job.size if job.held else 0
        job.held = False
        return found

    def _forget(self, name: str, client: _Client) -> None:
        """Put a client without jobs aside; the first that left is forgotten where there are too many."""
        if not (client.waiting or client.running or client.paused):
            self._former[name] = self._clients.pop(name)
            if len(self._former) > MOST_FORMER:
                self._former.popitem(last=False)


def _rank(client: _Client) -> tuple[int, float, int, int]:
    return client.running, client.used, client.begun, client.waiting[0].number
