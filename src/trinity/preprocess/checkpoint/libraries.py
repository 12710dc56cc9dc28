"""Libraries that a model's own processor may ask for: their versions, and what to install where one is not here."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

_ASKED = re.compile(r"requires the ([\w.-]+) library")
_HOW = {
    "torchaudio": "install torchaudio in a build for this torch: without a GPU from PyTorch's index of builds for "
    "CPUs, else by pip install --no-deps torchaudio. With one for CUDA beside a torch without it, transformers loads "
    "no processor at all",
    "mistral-common": "pip install mistral-common soundfile; where numpy is newer than it allows (Python 3.12 and "
    "before), pip install --no-deps mistral-common, and tiktoken, pydantic-extra-types and pycountry",
}


def library_version(name: str) -> str:
    """Return the version of an installed distribution; "" if it is not here."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def explain_library(error: BaseException) -> str:
    """Say what to install where ``error`` is of a library that is not here; "" for any other error."""
    asked = _ASKED.search(str(error))
    lacking = error.name if isinstance(error, ModuleNotFoundError) else None
    name = asked[1] if asked else next((each for each in _HOW if f"/{each}/" in str(error)), lacking or "")
    return how_to_install(name.partition(".")[0]) if name else ""


def how_to_install(name: str) -> str:
    """Say how to install a library."""
    return _HOW.get(name, f"pip install {name}")
