"""The requests that every multimodal type serves with images, their answers by ``generate()``, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.checkpoint_files import checkpoint
from support.recordings import Served, serve
from support.served_media_types import ALONE, IN_FRONT, WITHOUT_CHATS
from support.stage_driver import picture
from trinity.core.scheduler import BatchRules
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.model_types import PROVEN
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request, Sampling
from trinity.stages.models.state_probe import STATE_KINDS, list_layer_kinds
from trinity.stages.proof import prove
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.oracle import Oracle, OracleAnswer

OUTPUTS = 16
LEAST_BUDGET, MOST_STEPS = 11, 24  # tokens a step, or more where the longest prompt would take too many steps
KV_ROWS, IMAGE_ROWS = 4, 7
ROOMY = {"image": 2048, "kv": 4096}
WITHIN = 1e-4  # of the largest logit
LEAST_LOGIT = -1e30  # lower ones are banned by the model's own forward (Chameleon)
QUESTION = "What is in this picture, and who has left it there in the morning?"

Waves = tuple[tuple[Request, ...], ...]


def _turn(role: str, *parts: str) -> dict[str, Any]:
    content = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def _chat(name: str, images: Sequence[Any], *turns: dict[str, Any]) -> Request:
    greedy = Sampling(ignore_eos=True)
    return Request(messages=list(turns), images=list(images), max_tokens=OUTPUTS, sampling=greedy, request_id=name)


def _one(name: str, image: Any) -> Request:
    return _chat(name, [image], _turn("user", "Look at this.", "<image>", QUESTION))


def _ask(name: str, image: Any, text: str = QUESTION, marker: str = "<image>") -> Request:
    greedy = Sampling(ignore_eos=True)
    return Request(f"{marker}{text}", images=[image], max_tokens=OUTPUTS, sampling=greedy, request_id=name)


def waves(model_type: str) -> Waves:
    """All cases: "one" is alone while it is prefilled; later waves find what was before them in the caches."""
    if model_type in IN_FRONT:
        return _front_waves()
    if model_type in WITHOUT_CHATS:
        return _plain_waves(several=model_type not in ALONE)
    return _chat_waves(several=model_type not in ALONE)


def _front_waves() -> Waves:
    """Cases of a processor that puts one image in front of a plain text, as ``_chat_waves`` has them.

    asked: the image of "one" with another question. wide: an image of another shape.
    """
    asked = _ask("asked", picture(1), "Question: which colours has the boat? Answer:")
    wide = _ask("wide", picture(3, 130, 61), "A photo of")
    return (_ask("one", picture(1)),), (asked, wide), (_ask("again", picture(1)), _ask("other", picture(11)))


def _plain_waves(several: bool) -> Waves:
    """Cases of a processor without a chat template, as ``_chat_waves`` has them; of one image, two in place of three.

    square: an image that fills what it is cut or padded to.
    """
    greedy = Sampling(ignore_eos=True)
    three = [picture(2, 60, 90), picture(3, 130, 61), picture(4, 77, 150)]
    text = Request("A small red boat", max_tokens=OUTPUTS, sampling=greedy, request_id="text")
    beside = f"Name <image> the colours.<image><image> Compare them. {QUESTION}"
    three_in_one = Request(beside, images=three, max_tokens=OUTPUTS, sampling=greedy, request_id="three")
    wide, square = (
        _ask(name, image, f" {QUESTION}", "<image>")
        for name, image in (("wide", three[1]), ("square", picture(5, 56, 56)))
    )
    one, again, other = (
        _ask(name, picture(seed), f" {QUESTION}", "Look at this. <image>")
        for name, seed in (("one", 1), ("again", 1), ("other", 11))
    )
    beside_it = (three_in_one,) if several else (wide, square)
    return (one,), (text, *beside_it), (again, other, _ask("raw", picture(1), " of a boat", "A photo <image>"))


def _chat_waves(several: bool = True) -> Waves:
    """Cases of chats and of raw text.

    text: no image. three: three images of odd sizes over two turns. again: "one" once more. other: the prompt of "one"
    with another image of the same size. raw: the image of "one" in raw text. wide: in place of three, one of another
    shape.
    """
    three = [picture(2, 60, 90), picture(3, 130, 61), picture(4, 77, 150)]
    turns = (
        _turn("user", "<image>", "Name the colours."),
        _turn("assistant", "Red and blue."),
        _turn("user", "<image>", "<image>", "Compare them."),
    )
    raw = _ask("raw", picture(1), " of a boat", "A photo <image>")
    beside = _chat("three", three, *turns) if several else _one("wide", three[1])
    return (
        (_one("one", picture(1)),),
        (_chat("text", [], _turn("user", "Tell me about a small red boat.")), beside),
        (_one("again", picture(1)), _one("other", picture(11)), raw),
    )


def requests(model_type: str) -> list[Request]:
    return [request for wave in waves(model_type) for request in wave]


@dataclass(frozen=True)
class Known:
    """A type's checkpoint, and by request the answers of its own ``generate()`` and the tokens of the prompts.

    ``budget``: tokens of a step, with which a chunk of "one" ends inside its image.
    """

    directory: Path
    answers: dict[str, OracleAnswer]
    lengths: dict[str, int]
    budget: int


@cache
def known(model_type: str) -> Known:
    """Build a type's checkpoint, prove it where nobody listed it, and have transformers answer; once per process."""
    listed = model_type in PROVEN and model_type in ARCHITECTURES
    directory = checkpoint(model_type if listed else f"any-{model_type}")
    if not listed and find_verdict(directory) is None:
        failed = prove(directory).failed
        assert failed is None, f"{failed}"
    oracle, asked = Oracle(directory), requests(model_type)
    answers = {request.request_id: oracle.answer(request) for request in asked}
    lengths = {request.request_id: oracle.inputs(request)["input_ids"].shape[1] for request in asked}
    return Known(directory, answers, lengths, _choose_budget(directory, asked[0], max(lengths.values())))


def _choose_budget(directory: Path, one: Request, longest: int) -> int:
    """Choose a budget near the wanted one of which a multiple lies inside the image of "one"."""
    processor = RequestProcessor(directory)
    (span,) = processor.process(one).work.media
    processor.close()
    wanted = max(LEAST_BUDGET, longest // MOST_STEPS)
    near = sorted(range(2, span.end), key=lambda budget: abs(budget - wanted))
    return next((each for each in near if any(span.offset < at < span.end for at in range(0, span.end, each))), wanted)


def serve_type(model_type: str, placement: str, asked: Sequence[Sequence[Request]], **options: Any) -> Served:
    """Serve the requests of a type at once, in steps of a few tokens."""
    settings: dict[str, Any] = {
        "rules": BatchRules(token_budget=known(model_type).budget),
        "pools": ROOMY,
        "image_block_size": IMAGE_ROWS,
        "kv_block_size": KV_ROWS,
        **options,
    }
    return serve(known(model_type).directory, placement, asked, **settings)


def keeps_states(model_type: str) -> bool:
    """Tell if layers of its text model keep states, at which no prefix hit starts."""
    text = read_config(known(model_type).directory).get_text_config(decoder=True)
    return bool(set(list_layer_kinds(text)) & set(STATE_KINDS))


def tight_options(model_type: str) -> dict[str, Any]:
    """Keywords with which copies of "one" are sent back: two fit with a block more each and one free, no outputs."""
    prompt = -(-(known(model_type).lengths["one"] + 1) // KV_ROWS)
    return {
        "pools": {**ROOMY, "kv": 2 * (prompt + 1) + 1},
        "rules": BatchRules(token_budget=8 * known(model_type).budget),
        "reservation": "optimistic",
        "prefix_cache": False,
    }


def differences(model_type: str, found: Served) -> dict[str, str]:
    """Every request whose tokens are not the model's own, or whose logits are too far from its own."""
    wrong = {}
    for request in found.outputs:
        own = known(model_type).answers[request.partition("#")[0]]
        logits, allowed = found.logits(request), own.logits > LEAST_LOGIT
        off = float((logits - own.logits)[allowed].abs().max() / own.logits[allowed].abs().max())
        if found.tokens(request) != own.token_ids:
            wrong[request] = f"{found.tokens(request)} != {own.token_ids}"
        elif not (allowed == (logits > LEAST_LOGIT)).all():
            wrong[request] = "other logits are banned"
        elif not off < WITHIN:
            wrong[request] = f"logits are {off:.2g} of the largest off"
    return wrong


def cut_media(found: Served) -> set[str]:
    """Requests of which a prefill chunk ended inside a medium."""
    ends = {(row.request, row.start + row.length) for row in found.record.prefills()}
    return {
        request
        for request, work in found.works.items()
        for span in work.media
        if any(span.offset < end < span.end for name, end in ends if name == request)
    }
