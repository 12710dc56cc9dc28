"""Tiny checkpoints shared by every test, every pytest-xdist process and every later run."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import trinity.testing.checkpoints as checkpoints
from support.any_model.media_checkpoint import build_any_media, build_omni
from support.loop_guard import left_out
from support.paths import ROOT
from trinity.testing.checkpoints_quantization import build_fp8_checkpoint, build_quantised_checkpoint

FP8, ANY, OTHERS, WHOLE = "fp8-", "any-", "quantised-", "whole-"
CACHE = ROOT / ".pytest_cache" / "trinity-checkpoints"


@cache
def recipe_hash() -> str:
    """Changes with the recipes' sources and with the transformers that writes the files."""
    with left_out():
        import transformers

    digest = hashlib.sha256(transformers.__version__.encode())
    folder = Path(checkpoints.__file__).parent
    for source in (*sorted(folder.glob("checkpoints*.py")), *sorted(folder.glob("any_media*.py"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@cache
def checkpoint(name: str) -> Path:
    """The directory of checkpoint ``name``, built when first asked for. Read it only: it is shared.

    "fp8-llava" is "llava" with FP8 weights, "any-qwen3_vl_moe" a multimodal type that nobody listed, and
    "quantised-bnb-nf4" one of ``checkpoints_quantization``, "whole-qwen2_5_omni" a thinker with its talker.
    """
    target = CACHE / recipe_hash() / name
    if not target.exists():
        build: Callable[[str, Path], Path] = (
            checkpoints.build_midsize if name in checkpoints.MIDSIZE_CHECKPOINTS else checkpoints.build_checkpoint
        )
        if name.startswith(FP8):
            build = build_fp8_checkpoint
        elif name.startswith(ANY):
            build = build_any_media
        elif name.startswith(OTHERS):
            build = build_quantised_checkpoint
        elif name.startswith(WHOLE):
            build = build_omni
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent))
        with left_out():
            build(name.removeprefix(FP8).removeprefix(ANY).removeprefix(OTHERS).removeprefix(WHOLE), scratch / name)
        _publish(scratch, name, target)
    return target


def _publish(scratch: Path, name: str, target: Path) -> None:
    # Another process may have built the same in the meantime; a rename onto a filled directory then fails.
    try:
        os.rename(scratch / name, target)
    except OSError:
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
