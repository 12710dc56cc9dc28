"""Serving engines, by what they add to each pass over a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class EngineOverhead(NamedTuple):
    """Seconds that a serving engine adds to every pass over the language model or the encoder.

    ``pass_s`` (s): of the pass. ``row_s`` (s): of each sequence in it.
    """

    pass_s: float
    row_s: float


ENGINES: Mapping[str, EngineOverhead] = {
    # Steps in CUDA graphs, as trinity runs them on a GPU: with 1 ms a pass the decode steps of NVIDIA's AIConfigurator
    # (see ``trinity.costs.step_cost.DEVICES``) come out within 11 %.
    "graphs": EngineOverhead(1e-3, 5e-6),
    # Kernels launched one by one: 20 ms a pass, as TriInfer measures (figure 3).
    "eager": EngineOverhead(0.02, 2e-5),
}
Engine = Literal["graphs", "eager"]
DEFAULT_ENGINE: Engine = "graphs"
