"""HybridPlanner: plans from a recorded trace, an SLO and devices (TriInfer 4.4)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from trinity.costs.cluster import Cluster
from trinity.costs.engines import DEFAULT_ENGINE, Engine
from trinity.costs.given_costs import GivenCosts, check_costs, load_costs, warn_of_dtypes
from trinity.costs.model_config import find_model_shape
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError, PlacementError, TraceError, TraceTooShort
from trinity.errors.arguments import Positive, Share, Whole, check_arguments, check_call
from trinity.placement import Group, Placement
from trinity.planner.algorithm2 import choose_best
from trinity.planner.bayesian import search_bayesian, subtract_cost
from trinity.planner.candidates import Deployment, iter_device_choices
from trinity.planner.cliffs import prefer_off_cliff
from trinity.planner.confirmation import confirm, mark_unconfirmed, merge_core_results
from trinity.planner.evaluate import (
    evaluate_core_result,
    evaluate_goodput,
    evaluate_replay,
    make_candidate,
    verify_on_cores,
)
from trinity.planner.hardware import DEFAULT_DEVICE, Devices, Hardware, check_simulator_options, choose_cluster
from trinity.planner.plan import Candidate, Objective, Plan
from trinity.planner.prices import iter_borrowed, price_steps
from trinity.planner.problem import GoodputCriterion, PlanningProblem, choose_ratio_step
from trinity.planner.progress import ProgressBar, Report
from trinity.planner.race import reaches
from trinity.planner.resample import DrawnTrace, plan_on_long_enough
from trinity.planner.search import (
    BoundedCandidate,
    SearchResult,
    is_same_deployment,
    rank_results,
    search_above,
    search_to_end,
    sort_by_guess,
)
from trinity.planner.search_config import Options, SearchConfig
from trinity.planner.strategy_result import StrategyResult
from trinity.planner.trace_repair import prepare_recorded
from trinity.simulation.simulator import Replay
from trinity.stage_kinds import all_letters
from trinity.traces.goodput import RequestOutcome
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace

logger = logging.getLogger("trinity")
SHORT = 2_000  # requests of a longer trace that are planned on where the cores must search
MOST_LISTED = 2_500  # candidates in a plan; of more, those with the best bounds
NO_SLO = SLO(1e6, 1e6)  # offline, steps are as large as throughput grows with them
REPLAYED: tuple[Objective, ...] = ("throughput", "effective_throughput")
MAX_WAITING, WAITING_EACH = 1024, 64  # a pipeline's default; for each instance where there are many
UNBOUNDED = 10**9  # offline, all requests wait at once
ReplayScorer = Callable[[Replay, Deployment], float]
PresentSearch = Callable[[BoundedCandidate], SearchResult]  # searches one to its end


@check_arguments
class HybridPlanner:
    """Finds the disaggregation method and ratio that serve a recorded trace best, by replaying it in virtual time.

    - ``model``: a checkpoint's folder or hub id, a name in ``trinity.costs.model_shape.MODELS``, or a ``ModelShape``.
    - ``slo`` (seconds): TTFT and TBT bounds; None for the objective "throughput" alone.
    - ``instances`` (count, None) of ``device`` ("H100"): a name, a ``Device``, or counts of each by name.
    - ``engine`` ("graphs"): what runs the steps on devices given by name; "eager" launches each kernel by itself, with
      20 ms a pass in place of 1 ms (``trinity.costs.engines.ENGINES``).
    - ``cluster`` (None): in place of these, devices with hosts and links. Device and engine are refused beside it.
    - ``cost`` (None): measured tables, or their file, in place of the devices' rooflines, for all of them or by name.
    - ``objective`` ("goodput"): "goodput"; "goodput_per_cost", with any choice of the devices; "fewest_instances" that
      serve ``rate``; "throughput", all requests at once; "effective_throughput", tokens/s a device in time at ``rate``,
      with any choice of the devices (EPD-Serve table 5).
    - ``rate`` (requests/s, None) and ``prices`` (an hour, by device, None): for the objectives that need them.
    - ``rule`` ("guard"), ``stable`` (True), ``share`` (0.9): when a rate holds, as in ``trinity.traces.goodput``.
    - ``search`` (``SearchConfig()``): strategy, seeds, and what is done about short traces.
    - ``progress`` (None): called as ``progress(replays, what)``; None shows a bar in a terminal or notebook.
    - ``options``: those of ``trinity.simulation.simulator.Simulator``: rules, budgets, routing, lanes, interference,
      transfers, memory_share, backend; not ``step_factor``.

    Raises ``ConfigError`` (``UnknownName``) for what cannot be asked, and where the model fits no device.

    ::

        planner = trinity.HybridPlanner("qwen2-vl-7b", trinity.SLO(2.0, 0.05), instances=8, device="H100")
        print(planner.plan(trinity.Trace.load("trace.jsonl")).explain())
    """

    def __init__(
        self,
        model: ModelShape | str | Path,
        slo: SLO | None,
        *,
        instances: Annotated[Whole, Meta(le=65_536)] | None = None,
        device: Devices = DEFAULT_DEVICE,
        engine: Engine = DEFAULT_ENGINE,
        cluster: Cluster | None = None,
        cost: GivenCosts = None,
        objective: Objective = "goodput",
        rule: SLORule = "guard",
        stable: bool = True,
        share: Share = 0.9,
        rate: Positive | None = None,
        prices: Mapping[str, float] | None = None,
        search: SearchConfig | None = None,
        progress: Report | None = None,
        **options: Any,
    ) -> None:
        options = check_simulator_options(options, _OWN)
        self.model = find_model_shape(model)
        found = choose_cluster(cluster, device, instances, engine)
        if instances is not None and instances != found.size and objective not in ("goodput_per_cost", REPLAYED[1]):
            raise ConfigError(f"instances={instances}, and {found.size} devices are given: leave one of both out")
        self.most = found.size if instances is None else min(instances, found.size)
        search = search or SearchConfig()
        self.options = Options(objective, rate, search, progress)
        self._check(slo)
        self.waiting = options.setdefault("max_waiting", choose_waiting(objective, found.size))
        costs = load_costs(cost)
        check_costs(costs, self.model, found.devices)
        warn_of_dtypes(costs, self.model, found.devices)
        self.hardware = Hardware(self.model, found, costs, prices or {}, options)
        self.asked = GoodputCriterion(slo or NO_SLO, rule, stable, share, search.least_requests)
        self.slo = slo
        self._simulates()

    def _check(self, slo: SLO | None) -> None:
        own = self.options
        if (slo is None) != (own.objective == "throughput"):
            raise ConfigError('the objective "throughput" has no SLO (slo=None), and every other one needs one')
        if own.objective == "fewest_instances" and own.rate is None:
            raise ConfigError('the objective "fewest_instances" needs rate=, in requests a second')
        if own.search.strategy == "bayesian" and own.objective != "goodput":
            raise ConfigError('strategy "bayesian" has an objective of its own, f - beta * cost: leave objective= out')

    def _simulates(self) -> None:
        """Raise ``ConfigError`` now for options that no simulator takes."""
        self.hardware.simulator(self._general, self.asked.slo)

    @property
    def _general(self) -> Deployment:
        names = self.hardware.names
        return Deployment.of(Placement.of([Group(len(names), all_letters())]), names)

    def __repr__(self) -> str:
        devices = " and ".join(dict.fromkeys(self.hardware.names))
        return f"HybridPlanner({self.model.name} on up to {self.most} of {devices}, objective {self.options.objective})"

    @check_call
    def plan(self, trace: Trace, present: Placement | str | None = None) -> Plan:
        """Find the best placement for this trace, with every candidate's figures; ``present`` is searched to its end.

        Raises ``TraceError`` for an empty trace and invalid time stamps, ``TraceTooShort`` where the trace is too short
        for an answer, ``ConfigError`` where the model, or ``present``, fits none of the devices.
        """
        now = parse_present(present)
        if not len(trace):
            raise TraceError("an empty trace cannot be planned on: serve or load some requests first")
        own = self.options
        recorded = prepare_recorded(trace, self.model, None if own.objective in REPLAYED else self.asked.share)
        with ProgressBar(own.progress) as progress:
            return plan_on_long_enough(
                recorded,
                own.search.seed,
                own.search.resample,
                lambda drawn: self._plan_within_budget(drawn, progress, now),
            )

    def _plan_within_budget(self, drawn: DrawnTrace, progress: ProgressBar, present: Placement | None) -> Plan:
        """Plan on the whole trace or, where the cores must search, on as much of it as they replay in a minute."""
        why = self.hardware.why_on_cores(self._general, self.asked.slo, drawn.trace)
        count = len(drawn.trace) if not why else min(SHORT, len(drawn.trace))
        while count < len(drawn.trace):
            note = f"Not screened ({why}): searched on the cores that serve, on the first {count:,} requests."
            logger.warning(note)
            try:
                short = DrawnTrace(drawn.trace.head(count), (*drawn.notes, note))
                return self._plan_on(short, progress, present, dear=True)
            except TraceTooShort:
                count *= 2
        return self._plan_on(drawn, progress, present)

    def _plan_on(self, drawn: DrawnTrace, progress: ProgressBar, present: Placement | None, dear: bool = False) -> Plan:
        offline = self.options.objective == "throughput"
        case = PlanningProblem(self.hardware, drawn.trace, self.asked, progress, offline, dear)
        searched = self._search(case)
        if not searched.found:
            raise ConfigError(f"{self.model.name} fits no placement: {case.misfits(self.hardware.names)}")
        by_replay = self._replay_one(case) if self.options.objective in REPLAYED else None
        searched = add_present(case, searched, present, self._devices, by_replay)
        searched = self._confirm(case, searched, present)
        if self.options.objective not in REPLAYED and not case.dear:
            needed = self.options.rate or 0.0 if self.options.objective == "fewest_instances" else 0.0
            searched = prefer_off_cliff(case, searched, self.options.search.strategy != "paper", needed)
        return self._write_plan(case, searched, drawn)

    def _search(self, case: PlanningProblem) -> StrategyResult:
        own = self.options
        if own.search.strategy == "bayesian":
            found, notes = search_bayesian(case, own.search.space, own.search.seed)
            runs, paper = case.trials.runs, self._search_paper(case)[1]
            return StrategyResult(found, paper and subtract_cost(case, paper, own.search.space), runs, notes)
        if own.objective in REPLAYED:
            return self._search_by_replay(case)
        if own.objective == "fewest_instances":
            return self._search_fewest(case, own.rate or 0.0)
        if own.search.strategy == "paper":
            known, paper = self._search_paper(case)
            return StrategyResult(known, paper, case.trials.runs)
        return self._race(case).add_paper_results(*self._search_paper(case))

    def _search_paper(
        self, case: PlanningProblem, names: Sequence[str] | None = None
    ) -> tuple[list[SearchResult], SearchResult | None]:
        """Search Algorithm 2's placements by its printed lines; return them, best first, and its own choice."""
        worth = self._worth(names or self._devices)
        entries = [
            each._replace(worth=worth)
            for each in case.bound_paper_choices(names or self._devices, self.options.search.split)
        ]
        found: dict[Deployment, SearchResult] = {}

        def replay(entry: BoundedCandidate, above: float) -> float:
            found[entry.deployment] = search_above(case.trials, entry, above)
            return found[entry.deployment].score

        best: BoundedCandidate | None = choose_best(entries, replay)[0]
        ranked = rank_results(found.values())
        return ranked, found[best.deployment] if best else next(iter(ranked), None)

    @property
    def _devices(self) -> tuple[str, ...]:
        return self.hardware.names[: self.most]

    def _worth(self, names: Sequence[str]) -> float:
        per_cost = self.options.objective == "goodput_per_cost"
        return 3600 / self.hardware.needed_price(names) if per_cost else 1.0

    def _race(self, case: PlanningProblem) -> StrategyResult:
        """Search by the strategy, without Algorithm 2's choice, whose replays do not count as the race's."""
        step = choose_ratio_step(self.most)
        if self.options.objective == "goodput_per_cost":
            return self._search_deployments(case, self._any_devices(case))
        searched = self._search_deployments(case, case.bound_deployments(self._devices, step))
        if step == 1 or not searched.found:
            return searched
        note = f"For {self.most} instances ratios were tried in steps of {step}, then all near the best one."
        return StrategyResult(case.refine(searched.found, self._devices, step), None, case.trials.runs, (note,))

    def _search_deployments(self, case: PlanningProblem, entries: Sequence[BoundedCandidate]) -> StrategyResult:
        return StrategyResult(case.search(self.options.search.strategy, entries), None, case.trials.runs)

    def _any_devices(self, case: PlanningProblem) -> list[BoundedCandidate]:
        """List every deployment on any choice of the devices."""
        chosen = iter_device_choices(self.hardware.available, self.most)
        return sort_by_guess(
            each for names in chosen for each in case.bound_deployments(names, worth=self._worth(names))
        )

    def _search_fewest(self, case: PlanningProblem, rate: float) -> StrategyResult:
        by_size: dict[int, list[BoundedCandidate]] = {}
        for names in iter_device_choices(self.hardware.available, self.most):
            by_size.setdefault(len(names), []).extend(case.bound_deployments(names, choose_ratio_step(len(names))))
        for entries in by_size.values():
            if reaches(case.trials, sort_by_guess(entries), rate):
                names = entries[0].deployment.devices
                return self._search_deployments(case, sort_by_guess(entries)).add_paper_results(
                    *self._search_paper(case, names)
                )
        searched = self._race(case).add_paper_results(*self._search_paper(case))
        note = f"No placement on up to {self.most} instances serves {rate:g} requests/s: this is the best there is."
        return searched._replace(notes=(note, *searched.notes))

    def _search_by_replay(self, case: PlanningProblem) -> StrategyResult:
        own, every = self.options, self.options.search.strategy == "exhaustive"
        offered, score, ceiling = self._by_replay(case)
        shared: dict[str, Any] = {"score": score, "ceiling": ceiling}
        first = search_by_replay(
            case, offered, case.bound_paper_choices(self._devices, own.search.split), every=True, **shared
        )
        paper = first[0] if first else None
        if own.search.strategy == "paper":
            return StrategyResult(first, paper, case.trials.runs)
        own_choice = own.objective == "effective_throughput"
        entries = (
            self._any_devices(case)
            if own_choice
            else case.bound_deployments(self._devices, choose_ratio_step(self.most))
        )
        found = search_by_replay(case, offered, entries, every=every, known=first, **shared)
        return StrategyResult(found, paper, case.trials.runs)

    def _replay_one(self, case: PlanningProblem) -> Callable[[BoundedCandidate], SearchResult]:
        offered, score, ceiling = self._by_replay(case)
        return lambda entry: search_by_replay(case, offered, [entry], score, ceiling, every=True)[0]

    def _confirm(self, case: PlanningProblem, searched: StrategyResult, present: Placement | None) -> StrategyResult:
        """Replay the best on the cores, where the search ran on stand-ins for their settings."""
        kinds = {each.entry.deployment.settings: each.entry.deployment for each in searched.found}
        stand_ins = [each for kind in kinds.values() for each in self.hardware.stand_ins(kind, self.asked.slo)]
        searched = searched._replace(stand_ins=tuple(dict.fromkeys(map(str, stand_ins))))
        if not stand_ins or self.options.objective in REPLAYED:
            return searched
        named = [*([searched.paper] if searched.paper else []), *find_present(searched, present)]
        cores = confirm(case, searched.found, named)
        paper = searched.paper and cores.of(searched.paper.entry.deployment)
        return searched._replace(
            found=merge_core_results(cores, searched.found),
            paper=paper.found if paper else searched.paper and mark_unconfirmed(searched.paper),
            cores=cores,
        )

    def _by_replay(self, case: PlanningProblem) -> tuple[Trace, ReplayScorer, Callable[[BoundedCandidate], float]]:
        """Return the trace as it is offered, the score of a replay of it, and a bound on an entry's score."""
        if self.options.objective == "throughput":
            return offer_at_once(case.trace), score_throughput, lambda entry: entry.upper
        rate = self.options.rate or case.trials.own
        load = case.bounds.load
        offered_tokens = rate * (1 + load.decode / load.requests)
        offered = case.trace.scale(rate=rate)
        return (
            offered,
            score_effective_throughput(case.asked.slo, case.asked.rule),
            lambda entry: offered_tokens / len(entry.deployment.devices),
        )

    # ------------------------------------------------------------ writing the plan

    def _write_plan(self, case: PlanningProblem, searched: StrategyResult, drawn: DrawnTrace) -> Plan:
        own, met = self.options, searched.found[0].score > 0 or searched.found[0].step is not None
        kept = searched.found[:MOST_LISTED]
        best = (
            kept[0]
            if met
            else max(kept, key=lambda each: make_candidate(case, each).best_attainment(case.asked.rule) or 0)
        )
        seeds = tuple(own.search.seed + 1 + n for n in range(own.search.seeds)) if own.objective not in REPLAYED else ()
        seeds = () if case.dear else seeds
        notes = [*drawn.notes, *searched.notes]
        if MAX_WAITING < self.waiting < UNBOUNDED:
            notes.append(f"Run it with max_waiting={self.waiting}: a pipeline's default of {MAX_WAITING} refuses more.")
        described, backend = self._describe(case, searched, best, seeds)
        if backend == "compiled" and met:
            notes.append(verify_on_cores(case, best))
        paper = searched.paper
        as_chosen = paper and (
            described if is_same_deployment(paper, best) else self._describe(case, searched, paper, seeds)[0]
        )
        rest = [each for each in kept if not any(is_same_deployment(each, top) for top in (best, paper) if top)]
        listed = [*([paper] if paper and not is_same_deployment(paper, best) else []), *rest]
        listed = listed if searched.cores else rank_results(listed)
        shown = [as_chosen if each is paper and as_chosen else make_candidate(case, each) for each in listed]
        costs, devices = {name: kind.cost for name, kind in self.hardware.kinds.items()}, self.hardware.by_name
        notes += iter_borrowed(devices, costs)
        if len(searched.found) > MOST_LISTED:
            notes.append(f"Of {len(searched.found):,} candidates the best {MOST_LISTED:,} are listed.")
        return Plan(
            model=self.model.name,
            objective=own.objective,
            strategy=own.search.strategy,
            rule=self.asked.rule,
            slo=self.slo,
            devices=tuple(self.hardware.labels[name] for name in self._devices),
            priced=tuple(price_steps(devices[name], costs[name], case.bounds.load) for name in devices),
            best=described,
            candidates=(described, *shown),
            paper=as_chosen,
            trace=drawn.trace.statistics(),
            seeds=seeds,
            runs=searched.runs,
            more_runs=case.trials.runs - searched.runs,
            met=met,
            backend=backend,
            notes=tuple(notes),
            stand_ins=searched.stand_ins,
            core_runs=searched.cores.runs if searched.cores else 0,
            core_requests=searched.cores.requests if searched.cores else 0,
        )

    def _describe(
        self, case: PlanningProblem, searched: StrategyResult, found: SearchResult, seeds: Sequence[int]
    ) -> tuple[Candidate, str]:
        if searched.cores:
            confirmed = searched.cores.of(found.entry.deployment)
            described = evaluate_core_result(case, confirmed, seeds) if confirmed else make_candidate(case, found)
            return described, "screening"
        if self.options.objective not in REPLAYED:
            return evaluate_goodput(case, found, seeds)
        described, backend = evaluate_replay(case, found, self._by_replay(case)[0])
        return described, "screening" if searched.stand_ins else backend


_OWN = tuple(name for name in inspect.signature(HybridPlanner).parameters if name != "options")


def choose_waiting(objective: Objective, instances: int) -> int:
    """Return the requests without a token that a pipeline of this many instances should take in."""
    return UNBOUNDED if objective == "throughput" else max(MAX_WAITING, WAITING_EACH * instances)


def offer_at_once(trace: Trace) -> Trace:
    """Return the same requests, all of them there from the start."""
    return Trace(row.request_at(0.0) for row in trace.by_arrival())


def score_throughput(replay: Replay, deployment: Deployment) -> float:
    """Score a replay by requests/s served to their end."""
    done = sum(each.finish_reason in COMPLETE for each in replay.outcomes)
    return done / replay.duration_s if replay.duration_s else 0.0


def score_effective_throughput(slo: SLO, rule: SLORule) -> ReplayScorer:
    """Score replays by tokens/s and device of the requests that are in time (EPD-Serve table 5)."""

    def score(replay: Replay, deployment: Deployment) -> float:
        tokens = sum(_tokens(each) for each in replay.outcomes if slo.is_met(each, rule))
        return tokens / replay.duration_s / len(deployment.devices) if replay.duration_s else 0.0

    return score


def _tokens(outcome: RequestOutcome) -> int:
    return 1 + len(outcome.itl_s)


def search_by_replay(
    case: PlanningProblem,
    offered: Trace,
    entries: Iterable[BoundedCandidate],
    score: ReplayScorer,
    ceiling: Callable[[BoundedCandidate], float],
    *,
    every: bool,
    known: Iterable[SearchResult] = (),
) -> list[SearchResult]:
    """Replay each once, best first; unless ``every``, skip those that cannot beat the best so far.

    ``ceiling``: a score that the entry cannot exceed.
    """
    found = list(known)
    done = {each.entry.deployment for each in found if each.exact}
    best = max((each.score for each in found if each.exact), default=0.0)
    for entry in entries:
        if entry.deployment in done:
            continue
        if not every and ceiling(entry) <= best:
            found.append(SearchResult(entry, False, None, entry.upper))
            continue
        case.trials.tell(f"{entry.deployment}")
        simulator = case.hardware.search_simulator(entry.deployment, case.asked.slo)
        value = score(simulator.replay(offered, entry.deployment.placement), entry.deployment)
        found.append(SearchResult(entry, True, None, entry.upper, value))
        best = max(best, value)
    return rank_results(found)


def parse_present(present: Placement | str | None) -> Placement | None:
    """Parse the placement that runs now; None where none was given. Raises ``PlacementError`` for what is none."""
    return Placement.parse(present) if isinstance(present, str) else present


def add_present(
    case: PlanningProblem,
    searched: StrategyResult,
    present: Placement | None,
    devices: tuple[str, ...],
    search: PresentSearch | None = None,
) -> StrategyResult:
    """Search ``present`` to its end unless that was done; nothing is added where it is None.

    ``devices``: names of those that it may run on, the first of them where the search has none for it. ``search``:
    searches it, by goodput where not given. Raises ``PlacementError`` where it does not fit them.
    """
    same = [each for each in searched.found if each.entry.deployment.placement == present]
    if present is None or any(each.exact for each in same):
        return searched
    entry = same[0].entry if same else _bound_present(case, present, devices, searched)
    added = search(entry) if search else search_to_end(case.trials, entry)
    others = [each for each in searched.found if each.entry.deployment != entry.deployment]
    return searched._replace(found=rank_results([*others, added]))


def find_present(searched: StrategyResult, present: Placement | None) -> list[SearchResult]:
    """List the result of the present placement that was searched to its end; empty where none was asked for."""
    return [each for each in searched.found if each.exact and each.entry.deployment.placement == present][:1]


def _bound_present(
    case: PlanningProblem, present: Placement, devices: tuple[str, ...], searched: StrategyResult
) -> BoundedCandidate:
    if present.size > len(devices):
        raise PlacementError(f"{present}, which runs now, has {present.size} instances; the plan is for {len(devices)}")
    deployment = Deployment.of(present, devices[: present.size])
    if why := case.hardware.misfit(deployment):
        raise PlacementError(f"{present}, which runs now, does not fit the plan's devices: {why}")
    return case.bound_deployment(deployment, searched.found[0].entry.worth)
