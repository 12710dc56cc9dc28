"""Bayesian search of a wider space (EPDServe 3.2.3 and appendix D): objective f - beta * cost, through Optuna."""

from __future__ import annotations

from importlib import import_module
from itertools import product
from typing import Any

from trinity.errors import ConfigError, pip_install
from trinity.placement import Group, Placement
from trinity.planner.algorithm2 import partition
from trinity.planner.candidates import Deployment
from trinity.planner.problem import PlanningProblem
from trinity.planner.search import SearchResult, rank_results
from trinity.planner.search_space import Space, list_knobs

_LEAST_SHARE = 0.01  # of a group, so that no weights are all zero


def search_bayesian(case: PlanningProblem, space: Space, seed: int) -> tuple[list[SearchResult], tuple[str, ...]]:
    """Search ``space.trials`` configurations; return them best first, with notes for the plan.

    Tree-structured Parzen estimator, seeded. The first configurations are Algorithm 2's and those with the best nominal
    bounds, with the knobs of Algorithm 1, under each reservation and spread. Raises ``ConfigError`` where Optuna is
    missing.
    """
    optuna = _optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        for start in _starts(case, space):
            study.enqueue_trial(start, skip_if_exists=True)
        found = [_run_trial(case, space, study) for _ in range(space.trials)]
    finally:
        optuna.logging.set_verbosity(before)
    once = {each.entry.deployment: each for each in found if each is not None}
    note = f"Objective: goodput - {space.beta:g} * cost, over {space.trials} configurations tried by Optuna's TPE."
    return rank_results(once.values()), (note,)


def _optuna() -> Any:
    try:
        return import_module("optuna")
    except ImportError as error:
        raise ConfigError(f"strategy 'bayesian' needs Optuna: {pip_install('plan')}") from error


def _starts(case: PlanningProblem, space: Space) -> list[dict[str, Any]]:
    names = case.hardware.names
    best = [*case.bound_paper_choices(names, "largest_remainder"), *case.bound_deployments(names)[:3]]
    usual = {name: values[0] for name, values in list_knobs(space).items()}
    starts = [_start(entry.deployment, len(names)) | usual for entry in best]
    every = product(space.reservations, space.spreads or (None,))
    each = [{"reservation": kept} | ({"spread": spread} if spread else {}) for kept, spread in every]
    return [start | knobs for knobs in each for start in starts]


def _start(deployment: Deployment, most: int) -> dict[str, Any]:
    groups = deployment.placement.groups
    shares = {f"share{place}": max(_LEAST_SHARE, group.count / most) for place, group in enumerate(groups)}
    return {"method": deployment.method, "instances": most} | shares


def _run_trial(case: PlanningProblem, space: Space, study: Any) -> SearchResult | None:
    """Evaluate one configuration that Optuna suggests; None where the model does not fit it."""
    trial = study.ask()
    deployment = _suggest(case, space, trial)
    if deployment is None or case.hardware.misfit(deployment):
        study.tell(trial, state=import_module("optuna").trial.TrialState.FAIL)
        return None
    entry = case.bound_deployment(deployment)
    step = case.trials.limit(deployment, entry.guess)
    found = subtract_cost(case, SearchResult(entry, True, step, entry.upper), space)
    study.tell(trial, found.score)
    return found


def subtract_cost(case: PlanningProblem, found: SearchResult, space: Space) -> SearchResult:
    """Score a result by f - beta * cost; cost is the price of an hour or, where none is known, the instances."""
    devices = found.entry.deployment.devices
    price = case.hardware.price(devices)
    return found._replace(value=found.rate - space.beta * (len(devices) if price is None else price))


def _suggest(case: PlanningProblem, space: Space, trial: Any) -> Deployment | None:
    most = len(case.hardware.names)
    method = trial.suggest_categorical("method", case.methods)
    count = trial.suggest_int("instances", min(most, space.fewest or most), most)
    roles = method.split("+")
    shares = [trial.suggest_float(f"share{place}", _LEAST_SHARE, 1.0) for place in range(len(roles))]
    settings = tuple((name, trial.suggest_categorical(name, values)) for name, values in list_knobs(space).items())
    if count < len(roles):
        return None
    groups = (Group(n, each) for n, each in zip(partition(count, shares), roles, strict=True))
    return Deployment.of(Placement.of(groups), case.hardware.names[:count], settings)
