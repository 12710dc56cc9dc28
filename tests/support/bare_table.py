"""A request table of a model of which it needs nothing."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from trinity.stages.models import RotaryPositions
from trinity.stages.request_table import RequestTable


class _Bare:
    media_token_ids: ClassVar[frozenset[int]] = frozenset()
    language = None

    class adapter:
        whole_media = False

        @staticmethod
        def positions(*_: Any) -> RotaryPositions:
            return RotaryPositions(None, 0)


def bare_table(block_rows: int = 16) -> RequestTable:
    return RequestTable(cast(Any, _Bare()), block_rows, 1)
