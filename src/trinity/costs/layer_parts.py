"""Parts of a language model's layers that cost other than a dense one's: experts, latent attention and states."""

from __future__ import annotations

import msgspec

from trinity.errors import ConfigError


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the experts that stand in some layers for the feed-forward part.

    layers: layers that have experts.
    experts: experts of such a layer.
    active: of these, those that a token goes through.
    ffn (elements): width of an expert.
    shared (elements, 0): width of what every token goes through beside them.

    Raises ``ConfigError`` for values out of range.
    """

    layers: int
    experts: int
    active: int
    ffn: int
    shared: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.active, self.ffn) < 1 or self.shared < 0 or self.active > self.experts:
            raise ConfigError(f"{self!r}: sizes must be at least 1, and active at most experts")

    def touched(self, rows: float) -> float:
        """Experts of a layer whose weights a step of so many rows reads, on average, if tokens choose them evenly."""
        return self.experts * (1.0 - float((1 - self.active / self.experts) ** rows))

    def weights(self, width: int, experts: float, matrices: int) -> float:
        """Weights of all its layers with so many ``experts``, of ``matrices`` each: router and shared part included."""
        return self.layers * width * (self.experts + matrices * (experts * self.ffn + self.shared))


class StateShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the states that some layers keep of a request, in place of keys and values of each token.

    layers: layers that keep states, and do not attend.
    nbytes (bytes): states of one request, of all of them.

    Raises ``ConfigError`` for values out of range.
    """

    layers: int
    nbytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.nbytes) < 1:
            raise ConfigError(f"{self!r}: sizes must be at least 1")


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of latent attention: what the cache holds of a token is one row, for all heads.

    rank (elements): width of a latent.
    rotated (elements): width of the part of a key that has positions, which all heads share.
    plain (elements): width of a head's key without it.
    value (elements): width of a head's value.
    query_rank (elements, 0): width of a query's latent; 0: queries have none.
    index (elements, 0): width of the key by which an indexer chooses tokens, a part of the row; 0: there is none.
    index_heads (heads, 0): of an indexer's queries.

    Raises ``ConfigError`` for values out of range.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int = 0
    index: int = 0
    index_heads: int = 0

    def __post_init__(self) -> None:
        least = min(self.query_rank, self.index, self.index_heads)
        if min(self.rank, self.rotated, self.plain, self.value) < 1 or least < 0:
            raise ConfigError(f"{self!r}: widths must be at least 1")

    @property
    def row(self) -> int:
        """Elements that the KV cache holds of a token in one layer."""
        return self.rank + self.rotated + self.index

    def weights(self, width: int, heads: int) -> int:
        """Weights of a layer's attention."""
        asked, rank = heads * (self.plain + self.rotated), self.query_rank
        queries = rank * (width + asked) if rank else width * asked
        rows = width * self.row + self.rank * heads * (self.plain + self.value)
        chosen = self.index_heads * (self.index * (rank or width) + width)
        return queries + rows + chosen + heads * self.value * width

    def attended(self, heads: int) -> int:
        """Multiply-adds of one query and one row: the score and the weighted latent, and an indexer's scores.

        All rows are read, and those that are not chosen hidden.
        """
        return heads * (2 * self.rank + self.rotated) + self.index_heads * self.index
