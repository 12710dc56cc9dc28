"""PromptProblem: why a prompt cannot be used, before the request is known."""

from __future__ import annotations


class PromptProblem(Exception):
    """Reason why a prompt cannot be used. ``media``: it concerns media, and becomes ``BadMedia``."""

    def __init__(self, message: str, media: bool = True) -> None:
        super().__init__(message)
        self.media = media
