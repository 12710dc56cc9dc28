"""InstanceCore: every decision that an instance takes, as a state machine without I/O.

Rules (docs/decisions/0001-one-sans-io-core.md tells why):

1. All state changes of an instance live here. No await, no torch, no socket, no clock:
   ``handle(event, now) -> [command]``.
2. A transfer is one Offer with parts, Ready as they are finished, one Commit, Pull and Pulled as often as needed, and
   exactly one Release from the target. The source may Withdraw: the target drains its pulls, then sends Release.
3. A block returns to its pool when no step and no transfer that uses it is in flight; cancel only marks.
4. A request reserves one kind at a time, its whole need of it at once, image before KV, first in first out per pool.
5. A block is free, or cached with no reference, or held. It becomes matchable only after Stepped or Pulled.
6. Cancel follows the request along the channel of its Offers; a tombstone names the next hop until Forget. Who takes in
   a request from another instance says so (Moved); who handed it to one that is lost says that (Gone).
7. Steps are per lane: ("joint",) is the paper's single batch, ("vision", "language") its dual stream. With ``depth`` 2
   a lane's next step is decided while one runs: it has no row that surely ends before, and one that a stop token ended
   runs for nothing. What such a row writes is its request's own until no step in flight has a row of it (rule 3).
8. A request moves from phase to phase by the rows of ``instance.phases.MOVES`` alone, and has the place of its phase.
"""

from trinity.core.instance.instance_core import InstanceCore as InstanceCore
