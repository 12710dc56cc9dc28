"""Readers of a virtual cluster: what each of them asked for and got, of whichever front end."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity.core.frontend_events import End
from trinity.core.messages import FRONTEND, Work


@dataclass
class RequestRecord:
    """Record of one request as its reader sees it; times are virtual seconds."""

    work: Work
    submitted: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    end: End | None = None
    ended: float | None = None


def label_reader(owner: str, request: str) -> str:
    """Name a reader: by the request's id at the first front end, with the front end's name ahead of it elsewhere."""
    return request if owner == FRONTEND else f"{owner}/{request}"
