"""Reads traces of other systems, loads the two that are shipped, and synthesises new ones.

::

    trace = traces.read_shipped("servegen-image-1h")           # one hour of production image traffic
    trace = traces.read_trace("azure_llm_2023_conv.csv.gz")      # trace.report says what was imputed
    trace = traces.synthesise("TextCaps", 2000, visual_tokens=lambda width, height: 576, rate=8, seed=0)
    trace = traces.resample(trace, 4000, seed=1)
    day = traces.densify(traces.read_shipped("servegen-image-24h"), 1 / 0.06)  # it has 6 % of the day's requests
"""

from __future__ import annotations

from importlib.resources import as_file, files

from trinity.errors import UnknownName
from trinity.errors.arguments import check_call
from trinity.traces.formats import FORMATS as FORMATS
from trinity.traces.formats import read_trace as read_trace
from trinity.traces.synthetic import DATASETS as DATASETS
from trinity.traces.synthetic import Dataset as Dataset
from trinity.traces.synthetic import densify as densify
from trinity.traces.synthetic import resample as resample
from trinity.traces.synthetic import synthesise as synthesise
from trinity.traces.trace import Trace

SHIPPED_TRACES = {
    "servegen-image-1h": ("servegen-image-1h.jsonl.gz", "servegen"),
    "servegen-image-24h": ("servegen-image-24h.jsonl.gz", "servegen"),
}


@check_call
def read_shipped(name: str) -> Trace:
    """Read a trace that comes with trinity; ``data/ORIGIN.md`` names its source.

    Raises ``UnknownName`` where ``name`` is not one of ``SHIPPED_TRACES``.
    """
    if name not in SHIPPED_TRACES:
        raise UnknownName("shipped trace", name, SHIPPED_TRACES)
    file, format = SHIPPED_TRACES[name]
    with as_file(files(__name__) / "data" / file) as path:
        return read_trace(path, format)
