"""Rows that their own request leaves no token are told apart, by the names of what bans; all others get theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.sampler_rows import SamplerRow, batch, row
from trinity.core.messages import ResolvedSampling, Work
from trinity.errors import StageError
from trinity.stages.sampler import sample, sample_open_rows
from trinity.stages.token_bans import make_bans

VOCABULARY, END = 12, 3
EVERY = tuple(range(VOCABULARY))
ALL_BUT_END = tuple(each for each in EVERY if each != END)


def banned(index: int = 0, text: tuple[int, ...] = (), most: int = 9, **fields: Any) -> SamplerRow:
    sampling = ResolvedSampling(**fields)
    work = Work(request="r", prompt=(1, 2), max_tokens=most, sampling=sampling, stop_ids=frozenset({END}))
    return SamplerRow(sampling, index, np.array(text, dtype=np.int64), make_bans(work))


def numbers(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


BARRED = {
    "suppress_tokens": banned(4, suppress_tokens=EVERY),
    "begin_suppress_tokens": banned(0, begin_suppress_tokens=EVERY),
    "suppress_tokens, begin_suppress_tokens": banned(0, suppress_tokens=EVERY[:6], begin_suppress_tokens=EVERY[6:]),
    "suppress_tokens, bad_words_ids": banned(
        1, suppress_tokens=(END,), bad_words_ids=tuple((each,) for each in ALL_BUT_END)
    ),
    "suppress_tokens, bad_words_ids, min_tokens": banned(
        1, (5,), suppress_tokens=EVERY[4:], bad_words_ids=((5, 0), (1,), (2,)), min_tokens=2
    ),
    "suppress_tokens, no_repeat_ngram_size": banned(3, (0, 1, 2), suppress_tokens=EVERY[3:], no_repeat_ngram_size=1),
    "suppress_tokens, forced_eos_token_id": banned(8, suppress_tokens=(END,), forced_eos_token_id=(END,)),
    "suppress_tokens, min_tokens": banned(1, suppress_tokens=ALL_BUT_END, min_tokens=2, temperature=1.0, seed=1),
}


@pytest.mark.parametrize("names", BARRED)
def test_a_barred_row_names_what_bans_and_others_get_their_tokens(names: str) -> None:
    others = [row(1), row(2, temperature=1.0, seed=7, logprobs=2), banned(2, suppress_tokens=(1, 2, 3))]
    logits = numbers(4)
    wanted = sample(logits[[0, 2, 3]], batch(others))
    kept = logits.clone()
    found, why = sample_open_rows(logits, batch([others[0], BARRED[names], *others[1:]]), {})
    assert [found[0], *found[2:]] == wanted
    assert list(why) == [1]
    assert f": {names} of the request" in why[1]
    assert f"for token {BARRED[names].index} of the output" in why[1]
    assert "take some out" in why[1]
    assert "allows" not in why[1]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("names", BARRED)
def test_with_one_token_less_it_is_open(names: str) -> None:
    one = BARRED[names]
    bans = one.bans
    assert bans is not None
    forced = bans.forces(one.index)
    held = {"suppressed": bans.suppressed, "first": bans.first, "words": bans.words}
    less = {name: ids[ids != (END if forced else 11)] for name, ids in held.items()}
    (found,), why = sample_open_rows(numbers(1), batch([replace(one, bans=replace(bans, **less))]), {})
    assert not why
    assert found.token == (END if forced else 11)


def test_a_grammar_is_named_and_several_rows_are_found_at_once() -> None:
    logits = numbers(3)
    logits[0, 2:] = -torch.inf  # what a grammar leaves
    rows = [banned(5, suppress_tokens=(0, 1)), banned(5, suppress_tokens=(0, 1)), banned(6, suppress_tokens=EVERY)]
    found, why = sample_open_rows(logits, batch(rows), {0: "the regex", 1: "the JSON schema"})
    assert sorted(why) == [0, 2]
    assert "suppress_tokens of the request" in why[0]
    assert "ban all tokens that the regex allows" in why[0]
    assert "another form" in why[0]
    assert found[1] == sample(logits[1:2], batch(rows[1:2]))[0]


@pytest.mark.parametrize("value", [float("nan"), -torch.inf])
def test_logits_without_a_largest_value_are_the_models_fault(value: float) -> None:
    """Bans or none; where another row is barred besides, its step fails, and each runs alone."""
    logits = numbers(2)
    logits[0] = value
    for rows in ([row(), row()], [banned(suppress_tokens=EVERY), row()], [row(), banned(suppress_tokens=EVERY)]):
        with pytest.raises(StageError, match="NaN or no finite value"):
            sample_open_rows(logits, batch(rows), {})
