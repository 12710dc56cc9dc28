"""HybridPlanner: a recorded trace, an SLO and devices in, a Plan out (TriInfer 4.4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import ModelShape, get_model_shape
from trinity.costs.step_cost import CostModel
from trinity.errors import ConfigError, TraceError, TraceTooShort, UnknownName
from trinity.placement import Group, Placement
from trinity.planner.bayesian import tuned, valued
from trinity.planner.candidates import Deployment, subsets
from trinity.planner.confirmation import Confirmation, confirm, confirmed_first, screened_only
from trinity.planner.evaluate import candidate, confirmed_details, detailed, seen_in, verified
from trinity.planner.hardware import Devices, Hardware, cluster_of
from trinity.planner.objectives import Scored, at_once, effective, replayed, throughput
from trinity.planner.plan import OBJECTIVES, Candidate, Objective, Plan
from trinity.planner.problem import Case, Question, coarse
from trinity.planner.progress import Progress, Report
from trinity.planner.race import race, reaches
from trinity.planner.resample import Drawn, long_enough
from trinity.planner.search import Entry, Found, likely_first, ranked
from trinity.planner.search_config import SearchConfig
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace

logger = logging.getLogger("trinity")
SHORT = 2_000  # requests of a longer trace that are planned on where the cores must search
KEPT = 2_500  # candidates that a plan lists; of more, those with the best bounds
NO_SLO = SLO(1e6, 1e6)  # offline, steps are as large as throughput grows with them
MAX_WAITING, WAITING_EACH = 1024, 64  # of a pipeline that is not told otherwise; of each instance where there are many
UNBOUNDED = 10**9  # offline, all requests wait at once
REPLAYED: tuple[Objective, ...] = ("throughput", "effective_throughput")


class Options(NamedTuple):
    """A planner's objective and search."""

    objective: Objective
    rate: float | None
    search: SearchConfig
    progress: Report | None


class Searched(NamedTuple):
    """What a strategy found, best first, in how many replays; Algorithm 2's own choice, and what to say."""

    found: list[Found]
    paper: Found | None
    runs: int
    notes: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    cores: Confirmation | None = None

    def beside(self, known: Sequence[Found], paper: Found | None) -> Searched:
        """With what Algorithm 2 found, which was searched to the end."""
        exact = {each.entry.deployment: each for each in (*known, *self.found) if each.exact}
        bounded = [each for each in self.found if each.entry.deployment not in exact]
        return self._replace(found=ranked([*exact.values(), *bounded]), paper=paper)


class HybridPlanner:
    """Finds the disaggregation method and ratio that serve a recorded trace best, by replaying it in virtual time.

    - ``model``: a name in ``trinity.costs.model_shape.MODELS``, or a ``ModelShape``.
    - ``slo`` (seconds): TTFT and TBT bounds; None for the objective "throughput" alone.
    - ``instances`` (count, None) of ``device`` ("H100"): a name, a ``Device``, or counts of each by name.
    - ``cluster`` (None): in place of both, devices with hosts and links.
    - ``cost`` (None): measured tables in place of the devices' rooflines, for all of them or by name.
    - ``objective`` ("goodput"): "goodput"; "goodput_per_cost", with any choice of the devices; "fewest_instances" that
      serve ``rate``; "throughput", all requests at once; "effective_throughput", tokens/s a device in time at ``rate``,
      with any choice of the devices (EPD-Serve table 5).
    - ``rate`` (requests/s, None) and ``prices`` (an hour, by device, None): for the objectives that need them.
    - ``rule`` ("guard"), ``stable`` (True), ``share`` (0.9): when a rate holds, as in ``trinity.traces.goodput``.
    - ``search`` (``SearchConfig()``): strategy, seeds, and what is done about short traces.
    - ``progress`` (None): called as ``progress(replays, what)``; None shows a bar in a terminal or notebook.
    - ``options``: those of ``trinity.simulation.simulator.Simulator``: rules, budgets, routing, lanes, interference,
      transfers, memory_share, engine.

    Raises ``ConfigError`` (``UnknownName``) for what cannot be asked, and where the model fits no device.

    ::

        planner = trinity.HybridPlanner("qwen2-vl-7b", trinity.SLO(2.0, 0.05), instances=8, device="H100")
        print(planner.plan(trinity.Trace.load("trace.jsonl")).explain())
    """

    def __init__(
        self,
        model: ModelShape | str,
        slo: SLO | None,
        *,
        instances: int | None = None,
        device: Devices = "H100",
        cluster: Cluster | None = None,
        cost: CostModel | Mapping[str, CostModel] | None = None,
        objective: Objective = "goodput",
        rule: SLORule = "guard",
        stable: bool = True,
        share: float = 0.9,
        rate: float | None = None,
        prices: Mapping[str, float] | None = None,
        search: SearchConfig | None = None,
        progress: Report | None = None,
        **options: Any,
    ) -> None:
        self.model = get_model_shape(model) if isinstance(model, str) else model
        found = cluster_of(device, instances) if cluster is None else cluster
        if instances is not None and instances != found.size and objective not in ("goodput_per_cost", REPLAYED[1]):
            raise ConfigError(f"instances={instances}, and {found.size} devices are given: leave one of both out")
        self.most = found.size if instances is None else min(instances, found.size)
        search = search or SearchConfig()
        self.options = Options(objective, rate, search, progress)
        self._check(slo, rule, share)
        self.waiting = options.setdefault("max_waiting", _waiting(objective, found.size))
        self.hardware = Hardware(self.model, found, cost, prices or {}, options)
        self.asked = Question(slo or NO_SLO, rule, stable, share, search.least_requests)
        self.slo = slo
        self._simulates()

    def _check(self, slo: SLO | None, rule: SLORule, share: float) -> None:
        own = self.options
        for what, given, known in (("objective", own.objective, OBJECTIVES), ("SLO rule", rule, SLO_RULES)):
            if given not in known:
                raise UnknownName(what, str(given), known)
        if not 0 < share <= 1:
            raise ConfigError(f"share lies above 0 and at most at 1, got {share}")
        if (slo is None) != (own.objective == "throughput"):
            raise ConfigError('the objective "throughput" has no SLO (slo=None), and every other one needs one')
        if own.objective == "fewest_instances" and own.rate is None:
            raise ConfigError('the objective "fewest_instances" needs rate=, in requests a second')
        if own.rate is not None and not 0 < own.rate < float("inf"):
            raise ConfigError(f"rate must be a positive number of requests a second, got {own.rate!r}")
        if own.search.strategy == "bayesian" and own.objective != "goodput":
            raise ConfigError('strategy "bayesian" has an objective of its own, f - beta * cost: leave objective= out')

    def _simulates(self) -> None:
        """Options that no simulator takes are refused now."""
        self.hardware.simulator(self._general, self.asked.slo)

    @property
    def _general(self) -> Deployment:
        names = self.hardware.names
        return Deployment.of(Placement.of([Group(len(names), "EPD")]), names)

    # ------------------------------------------------------------ a plan

    def plan(self, trace: Trace) -> Plan:
        """The best placement for this trace, with every candidate's figures.

        Raises ``TraceError`` for an empty trace and time stamps that are none, ``TraceTooShort`` where no answer can
        be had from it, ``ConfigError`` where the model fits none of the devices.
        """
        if not len(trace):
            raise TraceError("an empty trace cannot be planned on: serve or load some requests first")
        own = self.options
        with Progress(own.progress) as progress:
            return long_enough(
                Trace(trace.by_arrival()),
                own.search.seed,
                own.search.resample,
                lambda drawn: self._planned(drawn, progress),
            )

    def _planned(self, drawn: Drawn, progress: Progress) -> Plan:
        """On the whole trace or, where the cores must search, on as much of it as they replay in a minute."""
        why = self.hardware.why_on_cores(self._general, self.asked.slo)
        count = len(drawn.trace) if not why else min(SHORT, len(drawn.trace))
        while count < len(drawn.trace):
            note = f"Not screened ({why}): searched on the cores that serve, on the first {count:,} requests."
            logger.warning(note)
            try:
                return self._planned_on(Drawn(drawn.trace.head(count), (*drawn.notes, note)), progress, dear=True)
            except TraceTooShort:
                count *= 2
        return self._planned_on(drawn, progress)

    def _planned_on(self, drawn: Drawn, progress: Progress, dear: bool = False) -> Plan:
        offline = self.options.objective == "throughput"
        case = Case(self.hardware, drawn.trace, self.asked, progress, offline, dear)
        searched = self._search(case)
        if not searched.found:
            raise ConfigError(f"{self.model.name} fits no placement: {case.misfits(self.hardware.names)}")
        searched = self._confirmed(case, searched)
        return self._written(case, searched, drawn)

    def _search(self, case: Case) -> Searched:
        own = self.options
        if own.search.strategy == "bayesian":
            found, notes = tuned(case, own.search.space, own.search.seed)
            runs, paper = case.trials.runs, self._paper(case)[1]
            return Searched(found, paper and valued(case, paper, own.search.space), runs, notes)
        if own.objective in REPLAYED:
            return self._replayed(case)
        if own.objective == "fewest_instances":
            return self._fewest(case, own.rate or 0.0)
        if own.search.strategy == "paper":
            known, paper = self._paper(case)
            return Searched(known, paper, case.trials.runs)
        return self._raced(case).beside(*self._paper(case))

    def _paper(self, case: Case, names: Sequence[str] | None = None) -> tuple[list[Found], Found | None]:
        """Algorithm 2's candidates, and the first of them that is strictly greater than the others."""
        worth = self._worth(names or self._chosen)
        entries = [each._replace(worth=worth) for each in case.paper(names or self._chosen, self.options.search.split)]
        found = race(case.trials, entries)
        return found, found[0] if found else None

    @property
    def _chosen(self) -> tuple[str, ...]:
        return self.hardware.names[: self.most]

    def _worth(self, names: Sequence[str]) -> float:
        per_cost = self.options.objective == "goodput_per_cost"
        return 3600 / self.hardware.needed_price(names) if per_cost else 1.0

    def _raced(self, case: Case) -> Searched:
        """Without Algorithm 2's choice, whose replays do not count as the race's."""
        step = coarse(self.most)
        if self.options.objective == "goodput_per_cost":
            return self._searched(case, self._any_devices(case))
        searched = self._searched(case, case.entries(self._chosen, step))
        if step == 1 or not searched.found:
            return searched
        note = f"For {self.most} instances ratios were tried in steps of {step}, then all near the best one."
        return Searched(case.refined(searched.found, self._chosen, step), None, case.trials.runs, (note,))

    def _searched(self, case: Case, entries: Sequence[Entry]) -> Searched:
        return Searched(case.searched(self.options.search.strategy, entries), None, case.trials.runs)

    def _any_devices(self, case: Case) -> list[Entry]:
        """Every deployment on any choice of the devices."""
        chosen = subsets(self.hardware.available, self.most)
        return likely_first(each for names in chosen for each in case.entries(names, worth=self._worth(names)))

    def _fewest(self, case: Case, rate: float) -> Searched:
        by_size: dict[int, list[Entry]] = {}
        for names in subsets(self.hardware.available, self.most):
            by_size.setdefault(len(names), []).extend(case.entries(names, coarse(len(names))))
        for entries in by_size.values():
            if reaches(case.trials, likely_first(entries), rate):
                names = entries[0].deployment.devices
                return self._searched(case, likely_first(entries)).beside(*self._paper(case, names))
        searched = self._raced(case).beside(*self._paper(case))
        note = f"No placement on up to {self.most} instances serves {rate:g} requests/s: this is the best there is."
        return searched._replace(notes=(note, *searched.notes))

    def _replayed(self, case: Case) -> Searched:
        own, every = self.options, self.options.search.strategy == "exhaustive"
        offered, score, ceiling = self._by_replay(case)
        shared: dict[str, Any] = {"score": score, "ceiling": ceiling}
        first = replayed(case, offered, case.paper(self._chosen, own.search.split), every=True, **shared)
        paper = first[0] if first else None
        if own.search.strategy == "paper":
            return Searched(first, paper, case.trials.runs)
        own_choice = own.objective == "effective_throughput"
        entries = self._any_devices(case) if own_choice else case.entries(self._chosen, coarse(self.most))
        found = replayed(case, offered, entries, every=every, known=first, **shared)
        return Searched(found, paper, case.trials.runs)

    def _confirmed(self, case: Case, searched: Searched) -> Searched:
        """With the best replayed on the cores, where the search ran on other settings than theirs."""
        kinds = {each.entry.deployment.settings: each.entry.deployment for each in searched.found}
        stand_ins = [each for kind in kinds.values() for each in self.hardware.stand_ins(kind, self.asked.slo)]
        searched = searched._replace(stand_ins=tuple(dict.fromkeys(map(str, stand_ins))))
        if not stand_ins or self.options.objective in REPLAYED:
            return searched
        cores = confirm(case, searched.found, [searched.paper] if searched.paper else [])
        paper = searched.paper and cores.of(searched.paper.entry.deployment)
        return searched._replace(
            found=confirmed_first(cores, searched.found),
            paper=paper.found if paper else searched.paper and screened_only(searched.paper),
            cores=cores,
        )

    def _by_replay(self, case: Case) -> tuple[Trace, Scored, Callable[[Entry], float]]:
        """The trace as it is offered, what a replay of it scores, and what an entry's score cannot exceed."""
        if self.options.objective == "throughput":
            return at_once(case.trace), throughput, lambda entry: entry.upper
        rate = self.options.rate or case.trials.own
        load = case.bounds.load
        offered_tokens = rate * (1 + load.decode / load.requests)
        offered = case.trace.scale(rate=rate)
        return (
            offered,
            effective(case.asked.slo, case.asked.rule),
            lambda entry: offered_tokens / len(entry.deployment.devices),
        )

    # ------------------------------------------------------------ the plan is written

    def _written(self, case: Case, searched: Searched, drawn: Drawn) -> Plan:
        own, met = self.options, searched.found[0].score > 0 or searched.found[0].step is not None
        kept = searched.found[:KEPT]
        best = (
            kept[0] if met else max(kept, key=lambda each: candidate(case, each).best_attainment(case.asked.rule) or 0)
        )
        seeds = tuple(own.search.seed + 1 + n for n in range(own.search.seeds)) if own.objective not in REPLAYED else ()
        seeds = () if case.dear else seeds
        notes = [*drawn.notes, *searched.notes]
        if MAX_WAITING < self.waiting < UNBOUNDED:
            notes.append(f"Run it with max_waiting={self.waiting}: a pipeline's default of {MAX_WAITING} refuses more.")
        described, engine = self._described(case, searched, best, seeds)
        if engine == "compiled" and met:
            notes.append(verified(case, best))
        paper = searched.paper
        as_chosen = paper and (described if same(paper, best) else self._described(case, searched, paper, seeds)[0])
        rest = [each for each in kept if not same(each, best) and not (paper and same(each, paper))]
        listed = [*([paper] if paper and not same(paper, best) else []), *rest]
        listed = listed if searched.cores else ranked(listed)
        shown = [as_chosen if each is paper and as_chosen else candidate(case, each) for each in listed]
        if len(searched.found) > KEPT:
            notes.append(f"Of {len(searched.found):,} candidates the best {KEPT:,} are listed.")
        return Plan(
            model=self.model.name,
            objective=own.objective,
            strategy=own.search.strategy,
            rule=self.asked.rule,
            slo=self.slo,
            devices=self._chosen,
            best=described,
            candidates=(described, *shown),
            paper=as_chosen,
            trace=drawn.trace.statistics(),
            seeds=seeds,
            runs=searched.runs,
            more_runs=case.trials.runs - searched.runs,
            met=met,
            engine=engine,
            notes=tuple(notes),
            stand_ins=searched.stand_ins,
            core_runs=searched.cores.runs if searched.cores else 0,
            core_requests=searched.cores.requests if searched.cores else 0,
        )

    def _described(self, case: Case, searched: Searched, found: Found, seeds: Sequence[int]) -> tuple[Candidate, str]:
        if searched.cores:
            confirmed = searched.cores.of(found.entry.deployment)
            return confirmed_details(case, confirmed, seeds) if confirmed else candidate(case, found), "screening"
        if self.options.objective not in REPLAYED:
            return detailed(case, found, seeds)
        described, engine = seen_in(case, found, self._by_replay(case)[0])
        return described, "screening" if searched.stand_ins else engine


def _waiting(objective: Objective, instances: int) -> int:
    """Requests without a token that a pipeline of so many instances should take in."""
    return UNBOUNDED if objective == "throughput" else max(MAX_WAITING, WAITING_EACH * instances)


def same(one: Found, other: Found) -> bool:
    return one.entry.deployment == other.entry.deployment
