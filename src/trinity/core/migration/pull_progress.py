"""PullProgress: tracks which layers of which blocks of an offer's KV were pulled."""

from __future__ import annotations

from typing import NamedTuple

from trinity.core.messages import Ready


class Piece(NamedTuple):
    """Layers [layers[0], layers[1]) of blocks [blocks[0], blocks[1]) of a block table."""

    layers: tuple[int, int]
    blocks: tuple[int, int]

    @property
    def cells(self) -> int:
        return (self.layers[1] - self.layers[0]) * max(0, self.blocks[1] - self.blocks[0])


class PullProgress:
    """Progress of pulling a block table, in cells (one layer of one block). The first ``cached`` blocks are here.

    ``missing`` counts the cells that are not here. The first ``final`` blocks are written no more, as far as is known:
    the steps that wrote them have ended. ``AssertionError`` for a cell announced twice, or out of range.
    """

    def __init__(self, blocks: int, layers: int, cached: int) -> None:
        self.blocks, self.layers, self.cached = blocks, layers, min(cached, blocks)
        self.missing = (self.blocks - self.cached) * layers
        self.final = 0
        self._asked = [0] * blocks  # the layers of each block, as bits
        self._here = [0] * blocks

    def request(self, ready: Ready) -> Piece:
        """Mark the cells of a Ready as requested. Returns the piece to pull; it has no blocks where all are cached.

        A step announces all layers of its blocks at once when it has ended, and a later one begins behind these.
        """
        layers, (start, end) = ready.layers or (0, self.layers), ready.blocks or (0, self.blocks)
        assert 0 <= layers[0] < layers[1] <= self.layers, f"{ready} of {self.layers} layers"
        assert 0 <= start <= end <= self.blocks, f"{ready} of {self.blocks} blocks"
        piece = Piece(layers, (max(start, self.cached), end))
        bits = (1 << layers[1]) - (1 << layers[0])
        for block in range(*piece.blocks):
            assert not self._asked[block] & bits, f"{ready} names what was ready before"
            self._asked[block] |= bits
        self.final = max(self.final, end if ready.layers is None else start)
        return piece

    def count_whole(self) -> int:
        """Count the first blocks of which all layers are here, and are not written again.

        Who announces a block again says so ahead of all that it says of later blocks.
        """
        every, final = (1 << self.layers) - 1, max(self.cached, self.final)
        return next((block for block in range(self.cached, final) if self._here[block] != every), final)

    def note_arrival(self, piece: Piece) -> None:
        self.missing -= piece.cells
        bits = (1 << piece.layers[1]) - (1 << piece.layers[0])
        for block in range(*piece.blocks):
            self._here[block] |= bits

    def note_loss(self, piece: Piece) -> None:
        """Mark a piece whose pull failed as not requested."""
        bits = (1 << piece.layers[1]) - (1 << piece.layers[0])
        for block in range(*piece.blocks):
            self._asked[block] &= ~bits

    def invalidate(self, blocks: tuple[int, int]) -> None:
        """Mark blocks that the source writes again as missing. No pull of them may be in flight."""
        for block in range(max(blocks[0], self.cached), blocks[1]):
            self.missing += self._asked[block].bit_count()
            self._asked[block] = self._here[block] = 0
