"""Every architecture, each decode moved at the end of every step: generate()'s tokens and logits, in one life.

Sampled ones, with penalties, log-probabilities and a grammar, are compared with the same requests left alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.moved_streams import check_alike, count_moves, move_at_each_step, sampled
from support.recordings import TEXT_ONLY, Served, problems, serve
from support.request_cases import BUDGET, answers, names, red, waves
from support.thinned import FEW, thinned
from trinity.core.messages import Offer, Release, Send
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.testing.checkpoints import ARCHITECTURES

STOP = TransferPolicy(precopy="off")
RULES = BatchRules(token_budget=BUDGET, image_budget=60)


def moved(architecture: str, placement: str, patch: pytest.MonkeyPatch, waves: Any, **options: Any) -> Served:
    with patch.context() as inside:
        letters = "EPD" if "EPD" in placement else "D"
        move_at_each_step(inside, (f"{letters}0", f"{letters}1"))
        pools = {"image": 96, "kv": 512}
        options = {"transfers": STOP, **options}
        found = serve(checkpoint(architecture), placement, waves, rules=RULES, pools=pools, **options)
    moves = count_moves(found.record)
    for request, output in found.outputs.items():
        least = len(output.token_ids) - 6 if options.get("depth") != 2 else len(output.token_ids) // 3
        least = least if options["transfers"] is STOP else 0  # it ends while blocks go ahead, on a busy machine
        assert moves[request] >= least, f"{request} moved {moves[request]} times in {len(output.token_ids)} tokens"
        assert output.lives == 1, "no move costs a recovery"
    return found


OFTEN = (*FEW, "minicpmv4_6")


def placement_of(architecture: str) -> str:
    return "1P2D" if architecture in TEXT_ONLY else "1E1P2D"


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, OFTEN.__contains__))
def test_tokens_and_logits_are_those_of_generate(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = answers(architecture)  # outside of the pipeline's event loop
    found = moved(architecture, placement_of(architecture), monkeypatch, waves(architecture))
    assert set(found.outputs) == set(names(architecture))
    assert problems(found, wanted) == {}


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, FEW[1:3].__contains__))
def test_they_are_so_where_full_blocks_go_ahead(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, ahead = answers(architecture), TransferPolicy(precopy="on")
    found = moved(architecture, placement_of(architecture), monkeypatch, waves(architecture), transfers=ahead)
    assert problems(found, wanted) == {}
    offers = [each.message for _, each in found.record.commands(Send) if isinstance(each.message, Offer)]
    copies = {each.id for each in offers if each.copies}
    released = [each.message for _, each in found.record.commands(Send) if isinstance(each.message, Release)]
    assert sum(each.outcome == "pulled" for each in released if each.id in copies) > 0
    assert count_moves(found.record).total() > 0


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, FEW[2:].__contains__))
def test_sampled_ones_are_those_that_are_left_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (sampled(() if architecture in TEXT_ONLY else (red(),)),)
    pools = {"image": 96, "kv": 512}
    alone = serve(checkpoint(architecture), placement_of(architecture), asked, rules=RULES, pools=pools).outputs
    found = moved(architecture, placement_of(architecture), monkeypatch, asked).outputs
    assert found.keys() == alone.keys()
    for name, output in found.items():
        check_alike(output, alone[name])
    assert set(found["grammar"].text) <= set("yesno and"), found["grammar"].text


@pytest.mark.parametrize("options", [{"depth": 2}, {"reservation": "optimistic"}], ids=str)
@pytest.mark.parametrize("placement", ["1E1P2D", "2EPD"])
def test_other_ways_to_step_are_exact_too(
    placement: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answers("llava")
    assert problems(moved("llava", placement, monkeypatch, waves("llava"), **options), wanted) == {}
