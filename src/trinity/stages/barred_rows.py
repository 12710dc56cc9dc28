"""Rows that their own request's rules leave no token: bans alone, or bans amid the output of a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.sampler import sample, warp
from trinity.stages.sampler_rows import SamplerBatch
from trinity.stages.token_bans import TokenBans


def sample_open_rows(
    logits: Tensor, batch: SamplerBatch, forms: Mapping[int, str]
) -> tuple[list[Sampled], dict[int, str]]:
    """Draw the next token of each row as ``sample`` does; returns besides why rows have none, by their number.

    ``forms``: what rules the output of rows that have a grammar, such as "the regex". A barred row's own token means
    nothing. Raises ``StageError`` if a row of logits has no largest value before anything is banned.
    """
    try:
        return sample(logits, batch), {}
    except StageError:
        barred = _find_barred(logits, batch)
        if not barred:
            raise
    free = logits.clone()
    free[barred] = 0.0
    why = {row: _explain(bans, index, forms.get(row, "")) for row, bans, index in batch.bans if row in barred}
    left = [each for each in batch.bans if each[0] not in why]
    return sample(free, replace(batch, bans=left)), why


def _find_barred(logits: Tensor, batch: SamplerBatch) -> list[int]:
    """List the rows of numbers that have a token until bans take it."""
    banned = {row for row, _, _ in batch.bans}
    given = ~logits.isnan().any(dim=1) & (logits > -torch.inf).any(dim=1)
    left = (warp(logits, batch) > -torch.inf).any(dim=1)
    return [row for row in torch.nonzero(given & ~left).flatten().tolist() if row in banned]


def _explain(bans: TokenBans, index: int, form: str) -> str:
    names = ", ".join(_name_bans(bans, index))
    tokens, other = (f"all tokens that {form} allows", ", or ask for another form") if form else ("all tokens", "")
    return (
        f"nothing is left for token {index} of the output: {names} of the request, or of the checkpoint's generation "
        f"config where the request says nothing, ban {tokens}; take some out, or give an empty value{other}"
    )


def _name_bans(bans: TokenBans, index: int) -> list[str]:
    """Name the fields of ``Sampling`` that ban something at output ``index``."""
    forces = bans.forces(index)
    in_force = {
        "suppress_tokens": len(bans.suppressed),
        "begin_suppress_tokens": index == 0 and len(bans.first),
        "forced_eos_token_id": forces,
        "bad_words_ids": not forces and (len(bans.words) or bans.sequences),
        "no_repeat_ngram_size": not forces and bans.ngram,
        "min_tokens": not forces and index < bans.min_tokens and len(bans.early),
    }
    return [name for name, active in in_force.items() if active]
