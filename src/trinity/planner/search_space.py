"""Knobs of the runtime beside a placement (EPDServe 3.2.3 and appendix D): batch limits, queues, reservation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from trinity.core.instance.settings import RESERVATIONS, check_reservation
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError
from trinity.planner.bounds import Kind
from trinity.planner.candidates import Deployment
from trinity.traces.trace import SLO

SEARCHED = 0  # a batch limit that Algorithm 1 finds by itself


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What a wider search may choose from.

    ``tokens``: prefill tokens and decodes a step of instances that do not decode, ``mixed_tokens`` of those that do,
    ``images`` an encode batch; 0 is what Algorithm 1 finds. ``reservations`` of KV blocks: as an instance's.
    ``fewest``: instances that are used at least; None: all. ``beta``: goodput in requests/s that one instance (where
    the planner has prices, one unit of price an hour) must be worth. ``trials``: configurations that are tried. Raises
    ``ConfigError`` for an empty choice, ``UnknownName`` for a reservation that is none.
    """

    tokens: tuple[int, ...] = (SEARCHED, 512, 1024, 2048, 4096, 8192)
    mixed_tokens: tuple[int, ...] = (SEARCHED, 32, 64, 128, 256, 512)
    images: tuple[int, ...] = (SEARCHED, 1, 2, 4, 8)
    orders: tuple[str, ...] = ("fcfs", "sjf")
    policies: tuple[str, ...] = ("alg1", "time", "prefill_first")
    routings: tuple[str, ...] = ("round_robin", "least_loaded")
    reservations: tuple[str, ...] = RESERVATIONS
    fewest: int | None = None
    beta: float = 0.0
    trials: int = 60

    def __post_init__(self) -> None:
        for each in self.reservations:
            check_reservation(each)
        bounded = self.trials >= 1 and self.beta >= 0 and (self.fewest is None or self.fewest >= 1)
        if not all(knobs_of(self).values()) or not bounded:
            raise ConfigError(
                "a space has at least one value for each knob, one trial, beta of at least 0, and fewest of at least 1"
            )


def knobs_of(space: Space) -> dict[str, tuple[str | int, ...]]:
    """Each knob's values, by its name."""
    return {
        "tokens": space.tokens,
        "mixed_tokens": space.mixed_tokens,
        "images": space.images,
        "order": space.orders,
        "policy": space.policies,
        "routing": space.routings,
        "reservation": space.reservations,
    }


def options_of(
    deployment: Deployment, slo: SLO, model: ModelShape, kinds: Mapping[str, Kind], rules: BatchRules
) -> dict[str, Any]:
    """What a simulator takes for a deployment's settings; nothing where it has none."""
    set_to = dict(deployment.settings)
    if not set_to:
        return {}
    kind = kinds[deployment.devices[0]]

    def budgets(roles: str) -> StepBudgets:
        limit = latency_bound(roles, slo.ttft, slo.tbt)

        def seconds(decodes: int, tokens: int, media: int) -> float:
            return kind.cost.at(decodes, tokens, media, context=512)

        found = predict_budgets(seconds, roles, limit, model.image_tokens if model.vision else 0, warn=False)
        tokens = int(set_to.get("mixed_tokens" if "D" in roles else "tokens", SEARCHED)) or found.token_budget
        media = int(set_to.get("images", SEARCHED)) * model.image_tokens or found.image_budget
        return msgspec.structs.replace(found, token_budget=tokens, image_budget=media)

    policy, order = set_to.get("policy", rules.policy), set_to.get("order", rules.order)
    chosen: dict[str, Any] = {
        "rules": replace(rules, policy=policy, order=order),  # type: ignore[arg-type]
        "budgets": {roles: budgets(roles) for _, roles, _ in deployment.groups},
    }
    return chosen | {name: set_to[name] for name in ("routing", "reservation") if name in set_to}
