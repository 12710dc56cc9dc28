"""Traces from elsewhere: other systems' files read, two that are shipped, and synthetic ones.

::

    trace = traces.shipped("servegen-image-1h")           # one hour of production image traffic
    trace = traces.read("azure_llm_2023_conv.csv.gz")      # trace.report says what was imputed
    trace = traces.synthesise("TextCaps", 2000, visual_tokens=lambda width, height: 576, rate=8, seed=0)
    trace = traces.resampled(trace, 4000, seed=1)
    day = traces.denser(traces.shipped("servegen-image-24h"), 1 / 0.06)  # it has 6 % of the day's requests
"""

from __future__ import annotations

from importlib.resources import as_file, files

from trinity.errors import UnknownName
from trinity.traces.formats import FORMATS as FORMATS
from trinity.traces.formats import read as read
from trinity.traces.synthetic import DATASETS as DATASETS
from trinity.traces.synthetic import Dataset as Dataset
from trinity.traces.synthetic import denser as denser
from trinity.traces.synthetic import resampled as resampled
from trinity.traces.synthetic import synthesise as synthesise
from trinity.traces.trace import Trace

SHIPPED = {
    "servegen-image-1h": ("servegen-image-1h.jsonl.gz", "servegen"),
    "servegen-image-24h": ("servegen-image-24h.jsonl.gz", "servegen"),
}


def shipped(name: str) -> Trace:
    """A trace that comes with trinity (``data/ORIGIN.md`` says where from). Raises ``UnknownName``."""
    if name not in SHIPPED:
        raise UnknownName("shipped trace", name, SHIPPED)
    file, format = SHIPPED[name]
    with as_file(files(__name__) / "data" / file) as path:
        return read(path, format)
