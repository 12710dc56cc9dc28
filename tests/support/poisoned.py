"""Virtual clusters in which instances die in the steps of some requests, beside all else that goes wrong."""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec.structs import replace

from support.deadly import deadly_cluster
from support.scenarios import largest_need, random_works
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import Step
from trinity.stage_kinds import DECODE, LANGUAGE_STAGES, PREFILL, encoder_of, encoder_of_media, order_letters

SAMPLED = 3  # tokens that are written before "S" kills


def stages_of(step: Step, life: str, written: int) -> str:
    """Letters of the stages of which a step has a row of this life; "S" where it samples its fourth token or more."""
    found = DECODE.letter * (life in step.decodes)
    found += order_letters(encoder_of_media(row.span.kind).letter for row in step.encodes if row.request == life)
    found += PREFILL.letter * any(row.request == life for row in step.prefills)
    sampling = life in step.decodes or any(row.request == life and row.last for row in step.prefills)
    return found + ("S" if sampling and written >= SAMPLED else "")


class Poison:
    """Makes an instance die in each step that has a row of a poison request at its stage; it is back ``back_s`` later.

    - ``stages``: the stage at which each of them kills, by its reader's id; "S" where a token is sampled, at P or D.
    - ``deaths``: that each has caused until its end: the instance, and how many others were there. ``later``: count
      of those behind its end, of what was left of it somewhere.
    - ``heard``: what an instance said before its death arrives; else its channels are cut at places of their own.
    """

    heard = False

    def __init__(self, cluster: VirtualCluster, stages: dict[str, str], back_s: float = 0.5) -> None:
        self.cluster, self.stages, self.back_s = cluster, stages, back_s
        self.deaths: dict[str, list[tuple[str, int]]] = {name: [] for name in stages}
        found: Any = cluster
        self.later = 0
        self._begin, found._begin = found._begin, self._poisoned

    def _poisoned(self, name: str, step: Step) -> None:
        readers: dict[str, str] = self.cluster._readers
        lives = {row.request for row in step.encodes} | {row.request for row in step.prefills} | set(step.decodes)
        killing = [life for life in lives if self._kills(name, step, life, readers.get(life, ""))]
        if killing and name not in self.cluster.lives.dead:
            for life in killing:
                others = [each for each in self.cluster.cores[name].state.requests if each != life]
                if self.cluster.outcomes[readers[life]].end is None:
                    self.deaths[readers[life]].append((name, len(others)))
                else:
                    self.later += 1
            self.cluster.kill(name, self.cluster.now, self.back_s)
            if self.heard:
                self.cluster.lives.hear_all(name, self.cluster.now)
        self._begin(name, step)

    def _kills(self, name: str, step: Step, life: str, reader: str) -> bool:
        asked = self.cluster.cores[name].state.requests.get(life)
        written = 0 if asked is None else asked.outputs
        return reader in self.stages and self.stages[reader] in stages_of(step, life, written)


def choose_poison(draw: Random, cluster: VirtualCluster) -> dict[str, str]:
    """One to three of a cluster's requests, and the stage at which each of them kills."""
    works = [record.work for record in cluster.outcomes.values()]
    stages = {}
    for work in draw.sample(works, k=min(len(works), draw.choice([1, 1, 2, 3]))):
        stages[work.request] = draw.choice(encoder_of(work) + LANGUAGE_STAGES[: 2 if work.max_tokens > 1 else 1])
    return stages


def poisoned_cluster(seed: int, failures: FailurePolicy, kills: bool = True) -> Poison:
    """A loaded cluster with poison; with ``kills``, deaths from outside. Faults, freezes and leases come anyway."""
    draw = Random(seed + 7_000_000_001)
    cluster = deadly_cluster(seed, failures=failures, kills=kills)
    return Poison(cluster, choose_poison(draw, cluster), draw.choice([0.05, 0.5, 2.0]))


CALM = ("EPD", "2EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "1E1P2D", "2E2P2D", "1E2EP3D", "1EP1ED1PD", "EPD+E+P+D")


def calm_cluster(seed: int, failures: FailurePolicy, placement: str | None = None) -> Poison:
    """A cluster in which nothing but poison goes wrong, and all that was said is heard."""
    draw = Random(seed + 8_000_000_009)
    works = random_works(draw, draw.choice([3, 6, 12]))
    pools = {kind: 3 * count for kind, count in largest_need(works).items()}
    placed = placement or draw.choice(CALM)
    settings = make_settings(placed, pools, image_block_size=4, kv_block_size=4)
    slow = draw.choice([0.0, 0.01, 0.1])
    durations = Durations(message=lambda each, *_: each.uniform(0.0, slow))
    cluster = VirtualCluster(settings, durations=durations, seed=seed, failures=failures)
    for work in works:
        cluster.submit(replace(work, deadline_s=None), draw.uniform(0.0, 1.0))
    poison = Poison(cluster, choose_poison(draw, cluster), draw.choice([0.05, 2.0]))
    poison.heard = True
    return poison


def sampling_cluster(seed: int, failures: FailurePolicy, placement: str | None = None) -> Poison:
    """The same, where what kills at a decode does so wherever a token is sampled: at a prefill that goes on, too.

    Some of the tokens before are on their way as it does, and are not heard.
    """
    poison = calm_cluster(seed, failures, placement)
    poison.heard = False
    longer = {name for name, outcome in poison.cluster.outcomes.items() if outcome.work.max_tokens > SAMPLED}
    poison.stages.update({name: "S" for name, stage in poison.stages.items() if stage == "D" and name in longer})
    return poison
