"""Positions of an open request: counted for its prompt where its model does so, and from its length behind it."""

from __future__ import annotations

import numpy as np
import pytest

from trinity.stages.models import RotaryPositions
from trinity.stages.request_table import OpenRequest

PADDED = RotaryPositions(np.array([[1, 2, 0, 0, 3]]), 1)  # without a place for two tokens of padding


@pytest.mark.parametrize(
    ("start", "end", "places"),
    [(0, 5, [1, 2, 0, 0, 3]), (1, 3, [2, 0]), (3, 8, [0, 3, 6, 7, 8]), (6, 8, [7, 8])],
)
def test_positions_of_one_axis_are_a_row_and_outputs_go_on_from_the_length(
    start: int, end: int, places: list[int]
) -> None:
    opened = object.__new__(OpenRequest)
    opened.rope = PADDED
    assert opened._rope(start, end).tolist() == places


def test_positions_of_several_axes_stay_apart() -> None:
    opened = object.__new__(OpenRequest)
    opened.rope = RotaryPositions(np.array([[0, 1], [0, 5], [0, 6]]), 4)
    assert opened._rope(1, 3).tolist() == [[1, 6], [5, 6], [6, 6]]
