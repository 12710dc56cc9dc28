"""Admission of a request's media as far as their number, kind and kind of source tell, before one is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from trinity.errors import BadMedia, RequestError
from trinity.errors.plain_values import is_address
from trinity.preprocess.media.media_kinds import LoadedProcessor, MediaKind
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Media, Request


def admit_media(
    request: Request, media: Sequence[Media], loaded: LoadedProcessor, kinds: Sequence[MediaKind], limits: MediaLimits
) -> None:
    """Raise what is wrong with the media of a request for a model of these kinds: ``BadMedia``, ``RequestError``."""
    name, model_type = request.request_id, str(loaded.config.model_type)
    if not media and (why := loaded.refused.get("text")):
        one = {"image": "an image", "audio": "a clip"}.get(kinds[0].name, f"a {kinds[0].name}")
        raise RequestError(f"model type {model_type!r} takes no prompt without {one}: {why}; give {one}", name)
    known = {kind.name for kind in kinds}
    for item in media:
        if item.kind not in known:
            takes = ", ".join(sorted(known)) or "text only"
            why = f": {loaded.refused[item.kind]}" if item.kind in loaded.refused else ""
            message = f"model type {model_type!r} takes no media of kind {item.kind!r} here{why}; it takes {takes}"
            raise BadMedia(message, name)
        if request.untrusted and isinstance(item.source, (str, os.PathLike)) and not is_address(item.source):
            message = (
                f"this {item.kind} is no data: URI, http: or https: URL, and nothing else is read for this request"
            )
            raise BadMedia(message, name)
    counts = Counter(item.kind for item in media)
    if (loaded.in_front or loaded.single) and counts["image"] > 1:
        why = "in front of its text" if loaded.in_front else "since what it makes of one depends on those beside it"
        message = f"model type {model_type!r} takes one image a prompt, {why}; {counts['image']} are given"
        raise BadMedia(f"{message}, so ask about each by itself", name)
    for kind in kinds:
        given, most = counts[kind.name], int(getattr(limits, kind.count_limit))
        if given > most:
            message = f"{given} {kind.name}s given, but the limit {kind.count_limit} is {most}; give fewer"
            raise BadMedia(message, name)
