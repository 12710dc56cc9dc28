"""Token bans, biases and penalties equal transformers' own logits processors, one after the other as ``generate()``
lists them, and vLLM's documented formulas where transformers has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from support.sampler_rows import SamplerRow, batch
from trinity.core.messages import ResolvedSampling, Work
from trinity.errors import StageError
from trinity.stages import token_bans
from trinity.stages.sampler import sample, warp
from trinity.stages.token_bans import make_bans

VOCABULARY = 24
tokens = st.integers(0, VOCABULARY - 1)
lists = st.lists(tokens, max_size=4).map(tuple)
samplings = st.builds(
    ResolvedSampling,
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 1.7, 100.0]), max_size=4).map(
        lambda b: tuple(b.items())
    ),
    no_repeat_ngram_size=st.integers(0, 4),
    min_tokens=st.sampled_from([0, 1, 5]),
    suppress_tokens=lists,
    begin_suppress_tokens=lists,
    bad_words_ids=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
    forced_eos_token_id=st.lists(tokens, max_size=2).map(tuple),
)
works = st.builds(
    lambda sampling, prompt, most, stops, named: Work(
        request="r",
        prompt=tuple(prompt),
        max_tokens=most,
        sampling=sampling,
        stop_ids=frozenset(stops),
        named_stop_ids=frozenset(stops[:named]),
    ),
    samplings,
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 6),
    st.lists(tokens, max_size=3, unique=True),
    st.integers(0, 2),
)


def processed(work: Work, ids: list[int], scores: torch.Tensor) -> torch.Tensor:
    """What transformers' ``_get_logits_processor`` would put together, in its order."""
    sampling, ends, chain = work.sampling, sorted(work.stop_ids - work.named_stop_ids), LogitsProcessorList()
    words = [list(word) for word in sampling.bad_words_ids]
    if sampling.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias]))
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(_vllm_penalties(sampling, ids[len(work.prompt) :]))  # type: ignore[arg-type]
    if sampling.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if [word for word in words if not (len(word) == 1 and word[0] in ends)]:  # it refuses a list that is empty then
        chain.append(NoBadWordsLogitsProcessor(words, torch.tensor(ends, dtype=torch.int64)))
    if sampling.min_tokens and ends:
        chain.append(MinNewTokensLengthLogitsProcessor(len(work.prompt), sampling.min_tokens, torch.tensor(ends)))
    if sampling.forced_eos_token_id:
        last = len(work.prompt) + work.max_tokens
        chain.append(ForcedEOSTokenLogitsProcessor(last, list(sampling.forced_eos_token_id)))
    if sampling.suppress_tokens:
        chain.append(SuppressTokensLogitsProcessor(list(sampling.suppress_tokens)))
    if sampling.begin_suppress_tokens:
        chain.append(SuppressTokensAtBeginLogitsProcessor(list(sampling.begin_suppress_tokens), len(work.prompt)))
    held: Any = torch.tensor([ids], dtype=torch.int64)
    return chain(held, scores[None].clone())[0]


def _vllm_penalties(sampling: ResolvedSampling, outputs: list[int]) -> Any:
    """vLLM's ``apply_penalties``: logits -= frequency * counts; logits -= presence * mask, of outputs alone."""

    def apply(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([float(outputs.count(token)) for token in range(VOCABULARY)])
        scores = scores - sampling.frequency_penalty * counts
        return scores - sampling.presence_penalty * (counts > 0).float()

    return apply


@settings(max_examples=250)
@given(st.lists(works, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_batch_is_what_transformers_makes_of_each_row(asked: list[Work], random: Any) -> None:
    rows, wanted = [], []
    logits = torch.randn(len(asked), VOCABULARY, generator=torch.Generator().manual_seed(random.randrange(999)))
    for work, scores in zip(asked, logits, strict=True):
        index = random.randrange(work.max_tokens)
        ids = [*work.prompt, *(random.randrange(6) for _ in range(index))]
        wanted.append(processed(work, ids, scores))
        rows.append(SamplerRow(work.sampling, index, np.array(ids), make_bans(work)))
    before = logits.clone()
    assert torch.equal(warp(logits, batch(rows)), torch.stack(wanted))
    assert torch.equal(logits, before), "the model's logits are the observer's too"


def test_ids_beyond_the_logits_are_passed_over() -> None:
    """Placeholders may have ids that no logit has."""
    beyond: dict[str, Any] = {"presence_penalty": 1.0, "logit_bias": ((97, 5.0), (98, 6.0))}
    rules = ResolvedSampling(no_repeat_ngram_size=1, suppress_tokens=(99,), forced_eos_token_id=(98, 3), **beyond)
    work = Work(request="r", prompt=(1, 500), max_tokens=3, sampling=rules)
    rows = [
        SamplerRow(rules, index, np.array(ids), make_bans(work))
        for index, ids in ((0, [1, 500]), (2, [1, 500, 1, 500]))
    ]
    free, forced = warp(torch.ones(2, 10), batch(rows))
    assert torch.isinf(free).nonzero().flatten().tolist() == [1]
    assert (forced == 0).nonzero().flatten().tolist() == torch.isfinite(forced).nonzero().flatten().tolist() == [3]


def test_long_runs_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_bans, "_MOST_ELEMENTS", 40)
    rules = ResolvedSampling(no_repeat_ngram_size=9)
    work = Work(request="r", prompt=(1,), sampling=rules)
    ids = np.array([*range(12), 20, *range(2, 10)])
    (found,) = warp(torch.zeros(1, VOCABULARY), batch([SamplerRow(rules, 0, ids, make_bans(work))]))
    assert torch.isinf(found).nonzero().flatten().tolist() == [10]


def test_a_row_without_any_token_left_fails_and_says_why() -> None:
    work = Work(request="r", prompt=(1,), sampling=ResolvedSampling(suppress_tokens=tuple(range(8))))
    row = SamplerRow(work.sampling, 0, np.array([1]), make_bans(work))
    with pytest.raises(StageError, match="NaN or no finite value"):
        sample(torch.zeros(1, 8), batch([row]))


def test_rules_are_made_where_there_are_some() -> None:
    assert make_bans(Work(request="r", prompt=(1,))) is None
    assert make_bans(Work(request="r", prompt=(1,), sampling=ResolvedSampling(logit_bias=((3, 1.0),)))) is not None
    looking = ({"no_repeat_ngram_size": 2}, {"bad_words_ids": ((1, 2), (3,))})
    for rule in ({"min_tokens": 1}, {"suppress_tokens": (1,)}, {"bad_words_ids": ((1,),)}, *looking):
        sampling = ResolvedSampling(**rule)  # type: ignore[arg-type]
        bans = make_bans(Work(request="r", prompt=(1,), sampling=sampling))
        assert bans is not None
        assert bans.looks_back is (rule in looking)
