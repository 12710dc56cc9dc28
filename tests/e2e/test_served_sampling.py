"""Sampling through the whole pipeline: a seed decides, not the placement and not the batch; transformers agrees."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.checkpoint_files import checkpoint
from support.recordings import METHODS, Served, copy_of, oracle, problems, serve, served
from support.request_cases import BUDGET, TEXT, answers, ask, red, waves
from support.thinned import thinned
from trinity.core.messages import ResolvedSampling
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.request import Request, Token
from trinity.testing.oracle import OracleAnswer

pytestmark = pytest.mark.xdist_group("llava")

WARM: dict[str, Any] = {"temperature": 0.8, "logprobs": 3}
ASKED: tuple[Request, ...] = (
    ask("plain", TEXT, seed=1, **WARM),
    ask("top_p", "<image>\nWhat is in it?", [red()], seed=2, top_p=0.8, **WARM),
    ask("top_k", TEXT, seed=3, top_k=5, **WARM),
    ask("min_p", "<image>\nWhat is in it?", [red()], seed=4, min_p=0.2, **WARM),
    ask("penalty", TEXT, seed=5, repetition_penalty=1.4, **WARM),
    ask("all", "See <image> and", [red()], seed=6, top_p=0.9, top_k=9, min_p=0.05, repetition_penalty=1.2, **WARM),
    ask("hot", "Why?", seed=7, temperature=3.0, logprobs=0),
    ask("discount", TEXT, seed=8, presence_penalty=0.9, frequency_penalty=0.6, **WARM),
    ask("bias", "<image>\nWhat is in it?", [red()], seed=9, logit_bias=dict.fromkeys(range(0, 300, 3), 2.5), **WARM),
    ask("favour", "Why?", seed=10, repetition_penalty=1.3, frequency_penalty=-0.8, logit_bias={65: 9.0}, **WARM),
)
GREEDY = (
    ask("greedy penalty", TEXT, repetition_penalty=1.5),
    ask("greedy logprobs", "<image>\nWhat is in it?", [red()], repetition_penalty=1.1, logprobs=5),
)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The tokens of every request by itself on one instance, nothing cached."""
    answers("llava")
    options = {"prefix_cache": False, "image_cache": False}
    one = [serve(checkpoint("llava"), "EPD", [[request]], **options).outputs for request in ASKED]
    return {name: output.token_ids for outputs in one for name, output in outputs.items()}


@pytest.fixture(scope="module", params=thinned(METHODS, ("EPD", "E+P+D").__contains__))
def together(request: pytest.FixtureRequest) -> Served:
    """All of them twice among the cases of the matrix, in small chunks."""
    answers("llava")
    crowd = [*waves("llava")[0], *ASKED, *GREEDY, *waves("llava")[1]]
    again = [copy_of(one, 2) for one in (*ASKED, *GREEDY)]
    return serve(checkpoint("llava"), request.param, [crowd, again], rules=BatchRules(token_budget=BUDGET))


def test_a_seed_gives_the_same_tokens_in_any_batch_and_placement(together: Served, alone: dict[str, list[int]]) -> None:
    assert len(alone) == len(ASKED)
    for name, tokens in alone.items():
        assert together.tokens(name) == tokens, name
        assert together.tokens(f"{name}#2") == tokens, name
        assert len(tokens) >= 32


def test_seeds_and_settings_matter(alone: dict[str, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone.values()}) == len(ASKED)
    assert alone["plain"] != answers("llava")["text"].token_ids[:36]


@cache
def _raw(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    request = next(one for one in (*ASKED, *GREEDY) if one.request_id == name)
    return oracle("llava").logits_along(request, tokens)


def test_logits_are_the_whole_models_along_the_sampled_tokens(together: Served) -> None:
    along = {
        one.request_id: OracleAnswer(together.tokens(one.request_id), _raw(one.request_id, _tokens(together, one)))
        for one in ASKED
    }
    assert problems(together, {**answers("llava"), **along, **_penalised()}) == {}


def _tokens(found: Served, request: Request) -> tuple[int, ...]:
    return tuple(found.tokens(request.request_id))


@cache
def _penalised() -> dict[str, OracleAnswer]:
    """generate(repetition_penalty=...) itself."""
    return {one.request_id: oracle("llava").answer(one) for one in GREEDY}


def test_a_greedy_penalty_is_that_of_generate(together: Served) -> None:
    for name, answer in _penalised().items():
        assert together.tokens(name) == answer.token_ids
        assert together.tokens(f"{name}#2") == answer.token_ids
    assert answers("llava")["text"].token_ids[:36] != _penalised()["greedy penalty"].token_ids


@pytest.mark.parametrize("request_", ASKED, ids=[one.request_id for one in ASKED])
def test_tokens_and_logprobs_are_what_transformers_would_allow(request_: Request, together: Served) -> None:
    """Log-probabilities after penalty and temperature; the token survives top-k, top-p and min-p."""
    name = request_.request_id
    sampling = together.works[name].sampling
    output, prompt = together.outputs[name], list(together.works[name].prompt)
    assert len(output.logprobs) == len(output.token_ids)
    for index, (token, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        before: Any = torch.tensor([prompt + output.token_ids[:index]])
        scores = _warped(sampling, output.token_ids[:index])(
            before, _raw(name, tuple(output.token_ids))[index, None].clone()
        )
        assert logprob == pytest.approx(float(scores.log_softmax(-1)[0, token]), abs=1e-3)
        assert _truncated(sampling)(before, scores)[0, token] > -torch.inf


def _warped(sampling: ResolvedSampling, outputs: list[int]) -> LogitsProcessorList:
    """transformers' own processors, and between them the formula of vLLM's and OpenAI's documents."""

    def discount(_: Any, scores: torch.Tensor) -> torch.Tensor:
        for token in set(outputs):
            scores[0, token] -= sampling.presence_penalty + outputs.count(token) * sampling.frequency_penalty
        return scores

    chain: list[Any] = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        discount,
        TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.logit_bias:
        chain.insert(0, SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias]))
    return LogitsProcessorList(chain)


def _truncated(sampling: ResolvedSampling) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if sampling.top_k:
        chosen.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chosen.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chosen.append(MinPLogitsWarper(sampling.min_p))
    return chosen


async def test_tokens_carry_the_likeliest_with_them(alone: dict[str, list[int]]) -> None:
    async with Pipeline(checkpoint("llava"), "E+P+D", dtype="float32") as pipe:
        async with pipe.stream(copy_of(ASKED[1], 3)) as stream:
            tokens: list[Token] = [token async for token in stream]
        output, together_again = stream.output, await pipe.complete(copy_of(ASKED[1], 4))
    assert [token.id for token in tokens] == alone["top_p"]
    raw = await asyncio.to_thread(_raw, "top_p", tuple(alone["top_p"]))
    for token, logits in zip(tokens, raw, strict=True):
        best = (logits / 0.8).log_softmax(-1).topk(3)
        assert token.top_logprobs is not None
        assert [number for number, _ in token.top_logprobs] == best.indices.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert output.logprobs == [token.logprob for token in tokens]
    assert output.top_logprobs == [token.top_logprobs for token in tokens]
    for one, other in zip(together_again.top_logprobs, output.top_logprobs, strict=True):  # complete() has them too
        assert [token for token, _ in one or ()] == [token for token, _ in other or ()]
    assert "".join(token.text for token in tokens) == output.text


async def test_without_a_seed_every_request_draws_its_own() -> None:
    asked = [ask(f"free#{number}", TEXT, temperature=1.0) for number in range(3)]
    found = await served(checkpoint("llava"), "PD+E", [asked])
    assert len({tuple(output.token_ids) for output in found.outputs.values()}) == 3
    assert all((output.logprobs, output.top_logprobs) == ([], []) for output in found.outputs.values())
