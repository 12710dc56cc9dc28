"""Chats that published folders are asked, their answers by transformers' documented route, and the folders."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support import published_folders, published_models
from support.checkpoint_files import CACHE, recipe_hash
from support.internvl_chats import needs_sentencepiece
from support.published_folders import write_folder
from support.published_models import PUBLISHED_MODELS
from support.stage_driver import picture
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.model_types import PROVEN
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.request import Media, Request, Sampling
from trinity.stages.proof import prove
from trinity.stages.proof.prompts import make_clip
from trinity.testing.oracle import Oracle

OUTPUTS = 12
WITHOUT_CHATS = ("PaliGemma-2", "LLaVA-1.5-bin")  # folders without a chat template
RATE = 16_000  # samples a second
_GREEDY = Sampling(temperature=0)  # all else is as the folder's generation config has it


@cache
def published_folder(name: str) -> Path:
    """Return the folder of one of ``PUBLISHED_MODELS``, written once and shared. Read it only."""
    digest = hashlib.sha256(recipe_hash().encode())
    for module in (published_folders, published_models):
        digest.update(Path(str(module.__file__)).read_bytes())
    target = CACHE / f"published-{digest.hexdigest()[:16]}" / name
    if PUBLISHED_MODELS[name].tokenizer_files == "sentencepiece":
        needs_sentencepiece()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        write_folder(PUBLISHED_MODELS[name], scratch / name)
        try:
            os.rename(scratch / name, target)
        except OSError:  # another process was first
            if not target.exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _turn(role: str, *parts: str) -> dict[str, Any]:
    content = [{"type": part} if part in ("image", "audio") else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def chats(name: str) -> list[Request]:
    """List what a folder is asked: a text, one medium, another in its place, two, and three over turns."""
    kind = "audio" if name == "Qwen2-Audio" else "image"
    media: list[Any]
    if kind == "audio":
        media = [make_clip(seed, 0.9 + seed / 7, RATE) for seed in range(3)]
        other: Any = make_clip(7, 0.9, RATE)
    else:
        media = [picture(3, 60, 80), picture(4, 130, 61), picture(5, 56, 56)]
        other = picture(9, 60, 80)
    if name in WITHOUT_CHATS:
        return [
            _ask("one", [media[0]], prompt="<image>what is this"),
            _ask("other", [other], prompt="<image>what is this"),
            _ask("two", media[:2], prompt="<image><image>compare them"),
            _ask("turns", media, prompt="<image><image>what and then <image>what"),
        ]
    three = [_turn("user", kind, "What?"), _turn("assistant", "A red boat."), _turn("user", kind, kind, "And these?")]
    return [
        _ask("text", [], messages=[_turn("user", "Name a colour.")]),
        _ask("one", media[:1], kind, messages=[_turn("user", kind, "What is this?")]),
        _ask("other", [other], kind, messages=[_turn("user", kind, "What is this?")]),
        _ask("two", media[:2], kind, messages=[_turn("user", kind, kind, "Compare them.")]),
        _ask("turns", media, kind, messages=three),
    ]


def _ask(name: str, media: list[Any], kind: str = "image", **prompt: Any) -> Request:
    given = [Media(kind, each) for each in media]
    return Request(media=given, max_tokens=OUTPUTS, sampling=_GREEDY, request_id=name, **prompt)


@dataclass(frozen=True)
class PublishedAnswers:
    """A folder that may be served, and the tokens of transformers' route by request."""

    folder: Path
    tokens: dict[str, list[int]]


@cache
def published_answers(name: str) -> PublishedAnswers:
    """Have transformers answer the chats of a folder, and prove one of a type that is not listed; once per process."""
    folder = published_folder(name)
    if _needs_proof(folder) and find_verdict(folder) is None:
        failed = prove(folder).failed
        assert failed is None, failed
    oracle = Oracle(folder)
    answers = {each.request_id: oracle.answer(each) for each in chats(name)}
    change = (answers["one"].logits[0] - answers["other"].logits[0]).abs().max()
    assert change > 1e-3 * answers["one"].logits[0].abs().max(), "another medium changes nothing: nothing is compared"
    return PublishedAnswers(folder, {request: each.token_ids for request, each in answers.items()})


def _needs_proof(folder: Path) -> bool:
    config = read_config(folder)
    listed = PROVEN.get(config.model_type)
    return listed is None or listed.tower != getattr(getattr(config, "vision_config", None), "model_type", None)
