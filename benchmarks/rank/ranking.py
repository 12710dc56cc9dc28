"""Ranks: where a placement stands among all that were searched to the end, and what choosing it loses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

from trinity.traces.trace import SLO

BAND = 0.02  # of the goodput: as far apart as two rates that a search tells from each other
MODELS = ("qwen2-vl-7b", "llava-1.5-7b", "llava-next-7b")
SETS = ("MME", "POPE", "TextCaps", "TextVQA", "VizWiz")
DEVICES = ("H100", "H20")
PAPER_RANKS = {  # TriInfer table 3
    "MME": (1.70, 1.42, 1.64),
    "POPE": (1.82, 1.31, 1.68),
    "TextCaps": (1.42, 1.53, 1.77),
    "TextVQA": (1.98, 1.43, 1.64),
    "VizWiz": (1.62, 1.32, 1.78),
}
_OWN = {  # TriInfer table 5: TTFT, TBT of most sets, TBT of POPE and TextCaps
    "llava-1.5-7b": (4.0, 0.08, 0.08),
    "llava-next-7b": (8.0, 0.60, 0.30),
    "qwen2-vl-7b": (8.0, 0.60, 0.10),
}
SETTINGS = (
    "TriInfer table 5",
    "half its TTFT",
    "half its TBT",
    "a quarter of its TTFT, half its TBT",
    "EPDServe table 9, MiniCPM-V 2.6, 2 images",
    "EPDServe table 9, InternVL2-8B, 4 images",
)


class Setup(NamedTuple):
    """One case of the comparison."""

    model: str
    dataset: str
    device: str
    setting: str

    @property
    def slo(self) -> SLO:
        return slo_of(self.model, self.dataset, self.setting)

    def __str__(self) -> str:
        return " / ".join(self)


def slo_of(model: str, dataset: str, setting: str) -> SLO:
    """The bounds of a setting, in seconds."""
    ttft, usual, tight = _OWN[model]
    tbt = tight if dataset in ("POPE", "TextCaps") else usual
    return {
        SETTINGS[0]: SLO(ttft, tbt),
        SETTINGS[1]: SLO(ttft / 2, tbt),
        SETTINGS[2]: SLO(ttft, tbt / 2),
        SETTINGS[3]: SLO(ttft / 4, tbt / 2),
        SETTINGS[4]: SLO(1.40, 0.04),
        SETTINGS[5]: SLO(2.40, 0.06),
    }[setting]


def drawn(seed: int = 0) -> list[Setup]:
    """All cases in the order in which they are run: any beginning of it has the pairs of model and set evenly.

    Within each pair devices and settings come as the seed says.
    """
    noise = random.Random(seed)
    pairs = list(product(MODELS, SETS))
    noise.shuffle(pairs)
    rows = []
    for model, dataset in pairs:
        row = [Setup(model, dataset, *rest) for rest in product(DEVICES, SETTINGS)]
        noise.shuffle(row)
        rows.append(row)
    return [each for turn in zip_longest(*rows) for each in turn if each is not None]


def rank(rates: Mapping[str, float], chosen: str, band: float = 0.0) -> int:
    """1 + how many have a goodput above the chosen one's by more than ``band`` of it."""
    least = rates[chosen] * (1 + band) * (1 + 1e-9)
    return 1 + sum(rate > least for rate in rates.values())


def regret(rates: Mapping[str, float], chosen: str) -> float:
    """Share of the best goodput that the chosen one's is short of; 0 where no goodput is above 0."""
    best = max(rates.values())
    return 1 - rates[chosen] / best if best > 0 else 0.0


def in_paper(rates: Mapping[str, float]) -> dict[str, float]:
    """Of those in the paper's own space: E+P+D, EP+D and ED+P (35 at N = 8)."""
    return {name: rate for name, rate in rates.items() if "PD" not in name}


class Judged(NamedTuple):
    """Result of a strategy's choice: by all rates of the trace it saw, and of the one held out."""

    strict: int
    band: int
    regret: float
    held_strict: int
    held_band: int
    held_regret: float
    runs: int


def judged(plan: Mapping[str, float], held: Mapping[str, float], chosen: str, runs: int) -> Judged:
    """``plan`` and ``held``: goodput of every placement on either trace. ``runs``: replays until it was chosen."""
    return Judged(
        rank(plan, chosen),
        rank(plan, chosen, BAND),
        regret(plan, chosen),
        rank(held, chosen),
        rank(held, chosen, BAND),
        regret(held, chosen),
        runs,
    )


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return sum(values) / len(values) if values else 0.0
