"""Predicts the seconds of a step from its rows: by a profile where there is one, else learned from past steps."""

from __future__ import annotations

from trinity.core.messages import Step
from trinity.core.scheduler import BatchRules
from trinity.stage_kinds import DECODE, PREFILL, count_alone, encoder_of_media, stage_of

LEARN = 0.1  # weight of the newest step


def units(step: Step) -> dict[str, int]:
    """Count the units of a step by stage: visual tokens of an encoder, prompt positions (P), decode rows (D)."""
    counted: dict[str, int] = {}
    for row in step.encodes:
        letter = encoder_of_media(row.span.kind).letter
        counted[letter] = counted.get(letter, 0) + row.span.tokens
    counted |= {PREFILL.letter: sum(row.length for row in step.prefills), DECODE.letter: len(step.decodes)}
    return {letter: count for letter, count in counted.items() if count}


class StepRates:
    """Predicts seconds of work per stage. ``per_unit`` seconds by letter; 0.0 of what was never seen."""

    def __init__(self, rules: BatchRules, roles: str) -> None:
        self._rules = rules
        self.per_unit = dict.fromkeys(roles, 0.0)

    def learn(self, step: Step, seconds: float) -> None:
        """Learn from a step of ``seconds``. A mixed step is shared among its stages by the rates known before."""
        if step.decodes and not (step.prefills or step.encodes):  # most steps
            self.learn_decodes(len(step.decodes), seconds)
        elif self._rules.cost is None and seconds > 0.0:
            self._learn_mixed(units(step), seconds)

    def learn_decodes(self, rows: int, seconds: float) -> None:
        """Learn from a step of ``seconds`` that only decoded."""
        if self._rules.cost is None and seconds > 0.0:
            old, new = self.per_unit[DECODE.letter], seconds / rows
            self.per_unit[DECODE.letter] = old + LEARN * (new - old) if old else new

    def _learn_mixed(self, counts: dict[str, int], seconds: float) -> None:
        known = self.per_unit
        expected = sum(known[letter] * count for letter, count in counts.items())
        for letter, count in counts.items():
            if not known[letter]:
                others = expected if len(counts) > 1 else 0.0
                known[letter] = max(seconds - others, seconds / (2 * len(counts))) / count
            else:
                known[letter] += LEARN * (known[letter] * seconds / expected - known[letter])

    def seconds(self, letter: str, count: int) -> float:
        """Predicted seconds of ``count`` units at a stage, alone and in steps no larger than the budget."""
        if self._rules.cost is None or not count:
            return self.per_unit[letter] * count
        budget = self._budget(letter)
        full, rest = divmod(count, budget) if letter != DECODE.letter else (0, count)
        return full * self._step(letter, budget) + (self._step(letter, rest) if rest else 0.0)

    def unit_seconds(self, letter: str) -> float:
        """Seconds that one more unit is expected to cost."""
        if self._rules.cost is None:
            return self.per_unit[letter]
        many = self._budget(letter)
        return self._step(letter, many) / many

    def _budget(self, letter: str) -> int:
        budget: int = getattr(self._rules, stage_of(letter).budget)
        return budget

    def _step(self, letter: str, count: int) -> float:
        assert self._rules.cost is not None
        return self._rules.cost.seconds(*count_alone(letter, count))
