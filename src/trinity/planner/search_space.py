"""Knobs of the runtime beside a placement (EPDServe 3.2.3 and appendix D): batch limits, queues, encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from trinity.core.instance.settings import RESERVATIONS, Reservation
from trinity.core.scheduler import BatchRules, latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.model_shape import ModelShape
from trinity.errors import ConfigError
from trinity.errors.arguments import KeywordsByName, Number, Whole, check_struct, check_value
from trinity.planner.bounds import Kind
from trinity.planner.candidates import Deployment
from trinity.stage_kinds import roles_of
from trinity.traces.trace import SLO

ALGORITHM1_LIMIT = 0  # a batch limit that Algorithm 1 finds by itself


class Space(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Values that a wider search may choose from.

    - ``tokens`` (tokens): prefill tokens and decodes a step, of instances that do not decode; 0 is Algorithm 1's limit.
    - ``mixed_tokens`` (tokens): the same, of instances that decode.
    - ``images`` (images): of an encode batch; 0 is Algorithm 1's limit.
    - ``orders``, ``policies``: of the queues, as in ``BatchRules``.
    - ``routings``: names of routing policies.
    - ``reservations``: of KV blocks, as an instance's.
    - ``spreads`` (()): encoders of a request, as a pipeline's ``spread``; empty: the planner's own. The cores replay
      more than 1, which takes long (decision 0092).
    - ``fewest`` (None): instances that are used at least; None: all.
    - ``beta`` (0.0): goodput in requests/s that one instance must be worth; where the planner has prices, one unit of
      price an hour.
    - ``trials`` (60): configurations to try.

    Raises ``ConfigError`` for an empty choice, ``UnknownName`` for an unknown reservation.
    """

    tokens: tuple[int, ...] = (ALGORITHM1_LIMIT, 512, 1024, 2048, 4096, 8192)
    mixed_tokens: tuple[int, ...] = (ALGORITHM1_LIMIT, 32, 64, 128, 256, 512)
    images: tuple[int, ...] = (ALGORITHM1_LIMIT, 1, 2, 4, 8)
    orders: tuple[str, ...] = ("fcfs", "sjf")
    policies: tuple[str, ...] = ("alg1", "time", "prefill_first")
    routings: tuple[str, ...] = ("round_robin", "least_loaded")
    reservations: tuple[str, ...] = RESERVATIONS
    spreads: tuple[Whole, ...] = ()
    fewest: Whole | None = None
    beta: Number = 0.0
    trials: Whole = 60

    def __post_init__(self) -> None:
        check_struct(self)
        for each in self.reservations:
            check_value("reservation", each, Reservation)
        if not all(list_knobs(self).values()):
            raise ConfigError("a space has at least one value for each knob")


def list_knobs(space: Space) -> dict[str, tuple[str | int, ...]]:
    """Return each knob's values, by its name; a knob of the planner's own value is none."""
    spread: dict[str, tuple[str | int, ...]] = {"spread": space.spreads} if space.spreads else {}
    return {
        "tokens": space.tokens,
        "mixed_tokens": space.mixed_tokens,
        "images": space.images,
        "order": space.orders,
        "policy": space.policies,
        "routing": space.routings,
        "reservation": space.reservations,
        **spread,
    }


def simulator_options(
    deployment: Deployment, slo: SLO, model: ModelShape, kinds: Mapping[str, Kind], rules: BatchRules
) -> dict[str, Any]:
    """Return a simulator's options for a deployment's settings; empty where it has none."""
    set_to = dict(deployment.settings)
    if not set_to:
        return {}
    kind = kinds[deployment.devices[0]]

    def budgets(roles: str) -> StepBudgets:
        limit = latency_bound(roles, slo.ttft, slo.tbt)

        def seconds(decodes: int, tokens: int, media: int) -> float:
            return kind.cost.at(decodes, tokens, media, context=512)

        found = predict_budgets(seconds, roles, limit, model.image_tokens if model.encoder else 0, warn=False)
        tokens = (
            int(set_to.get("mixed_tokens" if roles_of(roles).decodes else "tokens", ALGORITHM1_LIMIT))
            or found.token_budget
        )
        media = int(set_to.get("images", ALGORITHM1_LIMIT)) * model.image_tokens or found.image_budget
        return msgspec.structs.replace(found, token_budget=tokens, image_budget=media)

    policy, order = set_to.get("policy", rules.policy), set_to.get("order", rules.order)
    chosen: dict[str, Any] = {
        "rules": replace(rules, policy=policy, order=order),  # type: ignore[arg-type]
        "budgets": {roles: budgets(roles) for _, roles, _ in deployment.groups},
    }
    return chosen | {name: set_to[name] for name in ("routing", "reservation", "spread") if name in set_to}
