"""Admission of layers to kernels: by what they are, and only then by what they give on a probe.

A probe of some rows cannot prove what a layer does on others. So a swap needs both: the layer's source is one that was
read (``known_sources``), and its results on a probe (``probes``) are the kernel's. A release of transformers whose
source differs loses the kernel, not its exactness, and the log says so once for each class.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import transformers

from trinity.stages.kernels.fingerprints import fingerprint_class, fingerprint_function, fingerprint_text
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, OUTLINES, LayerPart
from trinity.stages.kernels.swaps import find_own_class, is_altered

logger = logging.getLogger("trinity")


def fingerprint_part(part: LayerPart, source: Any) -> str | None:
    """Fingerprint the class or function ``source`` as ``part`` needs it: with all that it calls, or one text alone."""
    method = OUTLINES.get(part)
    if not isinstance(source, type):
        return fingerprint_function(source) if method is None else fingerprint_text(source)
    return fingerprint_class(source) if method is None else fingerprint_text(getattr(source, method, None))


def is_known(part: LayerPart, source: Any) -> bool:
    """Tell if the class or function ``source`` is one that was read for ``part``; if not, the log says so once."""
    known = fingerprint_part(part, source) in KNOWN_SOURCES[part]
    if not known:
        _say_unknown(part, f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', type(source))}")
    return known


def is_known_module(part: LayerPart, module: Any) -> bool:
    """Tell the same of the class of ``module``; False if ``module`` itself has a method of its own."""
    return not is_altered(module) and is_known(part, find_own_class(module))


@cache
def _say_unknown(part: LayerPart, name: str) -> None:
    logger.warning(
        "%s of transformers %s keeps its own code, which is slower: its source is none of those known as %s "
        "(trinity/stages/kernels/known_sources.py)",
        name,
        transformers.__version__,
        part.value,
    )
