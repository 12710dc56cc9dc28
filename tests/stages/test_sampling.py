"""Sampling: truncation against transformers' processors, the distribution, and that a batch cannot move tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.sampler_rows import NO_IDS, SamplerRow, batch, row
from trinity.core.messages import ResolvedSampling, Sampled
from trinity.errors import StageError
from trinity.stages import sampler
from trinity.stages import sampler_rows as noise
from trinity.stages.sampler import draw, sample_greedy


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """As it is on a CPU, where the host looks; on a device, where it does not, it must be the same."""
    found = sampler.sample(logits, batch(rows))
    drawn = draw(logits, batch(rows))
    assert drawn.read(drawn.flat.numpy(), len(rows))[1] == found
    return found


def warp(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    return sampler.warp(logits, batch(seeded(rows)))


def truncate(scores: torch.Tensor, rows: Sequence[SamplerRow]) -> torch.Tensor:
    found = sampler.truncate(scores, batch(seeded(rows)), looks=True)
    assert torch.equal(sampler.truncate(scores, batch(seeded(rows))), found)
    return found


def seeded(rows: Sequence[SamplerRow]) -> list[SamplerRow]:
    return [replace(each, sampling=structs.replace(each.sampling, seed=0)) for each in rows]


def tokens(chosen: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in chosen]


def p_value(seen: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Of Pearson's chi-square test: how often chance alone is at least this far off."""
    statistic = float(((seen - expected) ** 2 / expected).sum())
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def random_logits(n: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    logits = random_logits(9, 1000).to(dtype)
    chosen = sample(logits, [row(i) for i in range(9)])
    assert chosen == [Sampled(int(t)) for t in logits.argmax(-1)]


def test_greedy_takes_one_copy_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the fast path must not build scores")

    monkeypatch.setattr(sampler, "warp", refuse)
    assert len(sample(random_logits(4, 50), [row(i) for i in range(4)])) == 4


def test_greedy_ignores_seed_and_truncation() -> None:
    logits = random_logits(1, 300)
    plain = sample(logits, [row()])
    assert sample(logits, [row(seed=5, top_k=2, top_p=0.1, logprobs=None)]) == plain


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 10), []) == []


# ---------------------------------------------------------------- against transformers


def processed(sampling: ResolvedSampling, scores: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """``scores`` [vocab] after what generate(do_sample=True) builds of the same settings, in its order."""
    chain: list[Any] = []
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    held: Any = torch.tensor([ids], dtype=torch.int64)
    return LogitsProcessorList(chain)(held, scores[None])[0]


samplings = st.builds(
    ResolvedSampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)


def near_a_border(scores: torch.Tensor, sampling: ResolvedSampling) -> bool:
    """Whether float32 rounding decides in transformers' top-p or min-p."""
    exact = processed(ResolvedSampling(temperature=1.0, top_k=sampling.top_k), scores.double(), [0])
    ordered = exact.sort().values.softmax(-1).cumsum(-1)
    ratio = (exact - exact.amax()).exp()
    close_p = (ordered - (1 - sampling.top_p)).abs().min() < 1e-5
    return bool(close_p or (sampling.min_p and (ratio - sampling.min_p).abs().min() < 1e-5))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(samplings, min_size=1, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([5, 33, 300, 5000]),
    st.lists(st.integers(0, 320), max_size=12),
)
def test_scores_and_truncation_are_those_of_transformers(
    settings_of_rows: list[ResolvedSampling], seed: int, vocab: int, ids: list[int]
) -> None:
    logits = random_logits(len(settings_of_rows), vocab, seed)
    held = np.asarray(ids, dtype=np.int64)
    rows = [SamplerRow(sampling, 0, held) for sampling in settings_of_rows]
    scores = warp(logits, rows)
    kept = truncate(scores, rows)
    for i, sampling in enumerate(settings_of_rows):
        assume(not near_a_border(scores[i], sampling))
        theirs = processed(sampling, logits[i], ids)
        torch.testing.assert_close(kept[i], theirs, rtol=1e-6, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=40),
    st.integers(0, 6),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
)
def test_ties_are_kept_together(values: list[int], top_k: int, top_p: float) -> None:
    scores = torch.tensor([values], dtype=torch.float32)
    sampling = ResolvedSampling(temperature=1.0, top_k=top_k, top_p=top_p)
    assume(not near_a_border(scores[0], sampling))
    ours = truncate(scores, [SamplerRow(sampling, 0, NO_IDS)])[0] > -math.inf
    theirs = processed(sampling, scores[0], [0]) > -math.inf
    least = scores[0][theirs].min()
    assert torch.equal(ours, scores[0] >= least)


def test_top_p_looks_beyond_its_first_guess() -> None:
    scores = torch.linspace(0, 1e-3, 6000)[None]
    kept = truncate(scores, [row(temperature=1.0, top_p=0.9)])[0] > -math.inf
    assert abs(int(kept.sum()) - 5400) <= 2
    assert bool(kept[-5390:].all())


def test_top_p_of_the_weight_that_top_k_left() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    kept = truncate(scores, [row(temperature=1.0, top_k=2, top_p=0.6)])[0] > -math.inf
    assert kept.tolist() == [True, False, False, False]  # 0.5 / 0.8 ≥ 0.6; without renormalising, two are kept


def test_the_largest_token_is_always_kept() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    kept = truncate(scores, [row(temperature=1.0, top_p=1e-9, min_p=1.0, top_k=1), row(temperature=1.0, top_p=1e-20)])
    assert (kept > -math.inf).tolist() == [[False, False, True]] * 2


def test_penalty_counts_a_token_once_and_ignores_ids_outside_the_logits() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.0]])
    scores = warp(logits, [row(ids=np.asarray([0, 0, 1, 7, -1]), repetition_penalty=2.0)])
    assert scores.tolist() == [[1.0, -2.0, 1.0]]
    assert logits.tolist() == [[2.0, -1.0, 1.0]]


def test_penalty_moves_a_greedy_row() -> None:
    logits = torch.tensor([[2.0, 1.9], [2.0, 1.9]])
    chosen = sample(logits, [row(ids=np.asarray([0]), repetition_penalty=1.5), row(ids=np.asarray([0]))])
    assert tokens(chosen) == [1, 0]


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_taken_after_temperature_and_before_truncation() -> None:
    logits = random_logits(2, 50)
    rows = [row(seed=1, temperature=0.5, top_k=1, logprobs=3), row(logprobs=0)]
    warm, greedy = sample(logits, rows)
    expected = (logits[0] / 0.5).log_softmax(-1)
    assert warm.logprob == pytest.approx(float(expected[warm.token]), abs=1e-5)
    assert warm.top is not None
    assert [t for t, _ in warm.top] == expected.topk(3).indices.tolist()
    assert [p for _, p in warm.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
    assert greedy.top == ()
    assert greedy.logprob == pytest.approx(float(logits[1].log_softmax(-1).max()), abs=1e-5)


def test_logprobs_see_the_penalty() -> None:
    (chosen,) = sample(torch.zeros(1, 2) + 1.0, [row(ids=np.asarray([0]), repetition_penalty=2.0, logprobs=2)])
    assert chosen.token == 1
    assert chosen.logprob == pytest.approx(-math.log(1 + math.exp(-0.5)), abs=1e-6)


def test_no_more_logprobs_than_tokens_and_none_unasked() -> None:
    wide, plain = sample(random_logits(2, 4), [row(logprobs=100), row(seed=1, temperature=1.0)])
    assert wide.top is not None
    assert len(wide.top) == 4
    assert (plain.logprob, plain.top) == (None, None)


# ---------------------------------------------------------------- noise


def test_noise_is_splitmix64() -> None:
    assert noise.scramble(noise._STRIDE) == 0xE220A8397B1DCDAF  # published: seed 0, first output
    first, last = (0xE220A8397B1DCDAF >> 12), noise.scramble(noise._STRIDE * 1000) >> 12
    found = noise.make_gumbel_noise(torch.tensor([0, 0]), torch.tensor([0, 999]))
    expected = [-math.log(-math.log((bits + 0.5) * 2.0**-52)) for bits in (first, last)]
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


def test_noise_stays_finite_at_both_ends() -> None:
    ends = torch.tensor([0, (1 << 52) - 1], dtype=torch.int64)
    uniform = (ends.double() + 0.5) * 2.0**-52
    assert bool((-(-uniform.log()).log()).isfinite().all())


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "temperature": 1.7}]
)
def test_frequencies_follow_the_distribution(fields: dict[str, Any]) -> None:
    draws = 20_000
    fields = {"temperature": 0.9, **fields}
    logits = random_logits(1, 8, seed=4, scale=1.0)
    rows = [row(i, seed=11, **fields) for i in range(draws)]
    seen = np.bincount(tokens(sample(logits.expand(draws, 8), rows)), minlength=8)
    expected = truncate(warp(logits, rows[:1]), rows[:1])[0].double().softmax(-1).numpy() * draws
    assert seen[expected == 0].sum() == 0
    likely = expected > 0
    assert p_value(seen[likely], expected[likely], int(likely.sum()) - 1) > 1e-3


def test_draws_of_neighbouring_indexes_and_seeds_are_independent() -> None:
    n = 4000
    logits = torch.zeros(n, 4)
    by_seed = [tokens(sample(logits, [row(i, seed=s, temperature=1.0) for i in range(n)])) for s in (0, 1)]
    pairs = [zip(by_seed[0], by_seed[1], strict=True), zip(by_seed[0], by_seed[0][1:], strict=False)]
    for pair in pairs:
        table = np.zeros((4, 4))
        for a, b in pair:
            table[a, b] += 1
        expected = table.sum(0) * table.sum(1)[:, None] / table.sum()
        assert p_value(table, expected, 9) > 1e-3


def test_draws_stay_as_they_are() -> None:
    """The same seed gives the same tokens in every release: a change here breaks users' recorded outputs."""
    logits = torch.linspace(-2, 2, 64)[None].expand(8, 64)
    chosen = tokens(sample(logits, [row(i, seed=42, temperature=1.0) for i in range(8)]))
    assert chosen == [52, 56, 60, 24, 43, 53, 54, 62]


# ---------------------------------------------------------------- the batch moves nothing

mixed = st.builds(
    ResolvedSampling,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.4]),
    top_k=st.sampled_from([0, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, 2]),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(mixed, min_size=2, max_size=6), st.sampled_from([7, 257, 1000]), st.randoms(use_true_random=False))
def test_a_row_is_the_same_whatever_the_others(
    settings_of_rows: list[ResolvedSampling], vocab: int, random: Any
) -> None:
    n = len(settings_of_rows)
    logits = random_logits(n, vocab, seed=random.randrange(1000))
    ids = np.asarray([1, 5, 5, 6])
    rows = [SamplerRow(sampling, random.randrange(50), ids) for sampling in settings_of_rows]
    together = sample(logits, rows)
    order = random.sample(range(n), n)
    shuffled = sample(logits[order], [rows[i] for i in order])
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(n)]
    assert tokens(together) == tokens(alone)
    assert tokens(shuffled) == [together[i].token for i in order]
    for a, b in zip(together, alone, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        assert a.logprob is None or a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_parts_of_a_large_batch_join_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(7, 100)
    rows = [row(i, seed=i, temperature=1.0) for i in range(7)]
    whole = sample(logits, rows)
    monkeypatch.setattr(sampler, "_CACHED_ELEMENTS", 200)
    monkeypatch.setattr(sampler, "_MOST_ELEMENTS", 300)
    assert sample(logits, rows) == whole


def test_a_repeated_step_draws_the_same_and_another_index_or_seed_does_not() -> None:
    logits = random_logits(1, 5000, scale=0.1).expand(3, 5000)
    rows = [row(3, seed=9, temperature=1.0), row(4, seed=9, temperature=1.0), row(3, seed=10, temperature=1.0)]
    first = tokens(sample(logits, rows))
    assert tokens(sample(logits, rows)) == first
    assert len(set(first)) == 3


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("fields", [{}, {"seed": 1, "temperature": 1.0}, {"logprobs": 1}])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_row_without_a_largest_logit_is_refused(fields: dict[str, Any], bad: float) -> None:
    logits = random_logits(2, 20)
    logits[1] = bad
    with pytest.raises(StageError, match="row 1"):
        sample(logits, [row(**fields), row(**fields)])


def test_one_nan_is_refused() -> None:
    logits = random_logits(1, 20)
    logits[0, 7] = math.nan
    with pytest.raises(StageError):
        sample(logits, [row(seed=1, temperature=1.0)])


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(3, 100)
    chosen = sample(logits, [row(i, seed=1, temperature=1e-40, top_p=0.9) for i in range(3)])
    assert tokens(chosen) == logits.argmax(-1).tolist()


def test_a_row_that_samples_needs_a_seed() -> None:
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(1, 4), [row(temperature=1.0)])


def test_any_whole_number_is_a_seed() -> None:
    logits = torch.zeros(3, 1000)
    rows = [row(seed=s, temperature=1.0) for s in (-1, (1 << 64) - 1, 1 << 80)]
    chosen = tokens(sample(logits, rows))
    assert chosen[0] == chosen[1] != chosen[2]


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 4), [row()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_token_is_torchs_own_the_first_of_those_that_tie(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    for rows, vocabulary in ((1, 1), (3, 7), (64, 301), (5, 4096)):
        scores = torch.randn(rows, vocabulary, generator=draw, dtype=torch.float64)
        for each in (scores, scores.round(), torch.zeros_like(scores), scores.masked_fill(scores < 1, -torch.inf)):
            each[:, -1] = 0.25  # no row is without a finite value
            typed = each.to(dtype)
            assert [one.token for one in sample(typed, [row()] * rows)] == typed.argmax(dim=-1).tolist()


def test_two_doubles_that_are_one_float_are_told_apart() -> None:
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    assert tokens(sample_greedy(scores)) == [1]
    assert tokens(sample_greedy(scores.float())) == [0]
