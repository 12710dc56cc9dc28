"""A stage that no release has: A encodes audio into blocks of its own kind, which P pulls; E encodes other media."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from support import scenarios, spread_clusters, together
from trinity.core.messages import MediaSpan, Work
from trinity.stage_kinds import PREFILL, StageKind, added_stage

SOUND = "audio"
AUDIO = StageKind(
    "A", "audio encode", "media", "vision", (), (SOUND,), "image_budget", "ttft", unit="clips", media=(SOUND,)
)
PLACEMENTS = (
    *("E+A+P+D", "2E2A1P1D", "EA+PD", "EAPD", "2EAPD", "1E1APD", "1A1EPD", "1E1AP1D", "1EP1AP1D", "2E1A2P2D"),
    *("1EA1P1D", "2EA2PD", "1ED1A1P", "1EAD1P", "1E1A1EAPD", "1EP1A1PD1D"),
)


@contextmanager
def audio_stage() -> Iterator[None]:
    """Have the stage A while the block runs."""
    with added_stage(AUDIO, before=PREFILL.letter):
        yield


def as_sound(span: MediaSpan) -> MediaSpan:
    """The same item as a clip, of another content."""
    return replace(span, kind=SOUND, content=f"clip of {span.content}")


def give_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the random loads on four stages, and half of their documents with clips in place of images."""
    document: Callable[..., tuple[list[int], list[MediaSpan]]] = scenarios.random_document
    picture: Callable[..., Work] = spread_clusters.picture_work

    def random_document(draw: Random, atomic: bool) -> tuple[list[int], list[MediaSpan]]:
        prompt, media = document(draw, atomic)
        return prompt, _sometimes(media, prompt)

    def picture_work(*given: Any) -> Work:
        work = picture(*given)
        return replace(work, media=tuple(_sometimes(list(work.media), list(work.prompt))))

    monkeypatch.setattr(scenarios, "random_document", random_document)
    monkeypatch.setattr(spread_clusters, "picture_work", picture_work)
    monkeypatch.setattr(together, "PLACEMENTS", PLACEMENTS)
    monkeypatch.setattr(together, "WITH_HELPERS", ("3A1E1PD", "2E2A1P1D", "2EA1PD", "3EA1P1D", "2A1AP1E1D"))
    monkeypatch.setattr(together, "MORE_HANDS", ("2E2A2P3D", "1E1A1EP2PD1D"))


def _sometimes(media: list[MediaSpan], prompt: list[int]) -> list[MediaSpan]:
    sounds = Random(f"{prompt} {[span.content for span in media]}").random() < 0.5
    return list(map(as_sound, media)) if sounds else media
