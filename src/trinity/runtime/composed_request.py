"""ComposedRequest: what a stage composed by hand knows of an open request."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.core.messages import KV, STATE, Work
from trinity.errors import ConfigError


@dataclass
class ComposedRequest:
    """An open request: its work and blocks, the rows that these hold and that are filled, and its tokens so far.

    ``state``: the block of its states, where the model keeps some.
    """

    work: Work
    blocks: tuple[int, ...]
    images: tuple[tuple[int, ...], ...]
    rows: int
    filled: int
    outputs: int
    state: tuple[int, ...] = ()

    def uses(self, kind: str) -> set[int]:
        """List the blocks that a step of it may still read; features are in the KV blocks once all is prefilled."""
        if kind == KV:
            return set(self.blocks)
        if kind == STATE:
            return set(self.state)
        return set() if self.filled == len(self.work.prompt) else {block for each in self.images for block in each}

    def check_prefill(self, work: Work, start: int) -> None:
        """Raise ``ConfigError`` if ``work`` cannot be prefilled from ``start``: it goes on where the last ended."""
        name = f"request {work.request}"
        if work != self.work:
            raise ConfigError(f"{name} is open with other work: close it, and open it with this")
        if self.outputs:
            raise ConfigError(f"{name} has its first token: decode it, or close it and open it again")
        if start > self.filled:
            raise ConfigError(f"the KV blocks of {name} are filled up to {self.filled}: prefill it from there")
        if self.state and start not in (0, self.filled):
            raise ConfigError(
                f"the states of {name} are those of {self.filled} tokens: prefill it from there, or from 0"
            )
        if len(self.images) < len(work.media):
            raise ConfigError(f"{name} is open without its images: open it with images=")
