"""Weights that a checkpoint's files lack, and that nothing depends on: found by running the model with others in place.

LLaVA takes the states before the last layer of its tower, so that this layer and the norm behind it run for nothing,
and some folders leave them out. Which these are is no list here: the output must stay the same, to the bit, whatever
such tensors hold. They stay NaN, so that an input which did depend on them would give no numbers in place of wrong
ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.proof_requests import process_samples
from trinity.stages.models.base import ModelAdapter

Run = Callable[[], Sequence[Tensor]]


@torch.inference_mode()
def list_needed(model: Any, names: Collection[str], run: Run) -> list[str]:
    """List those of a model's tensors ``names`` on which the output of ``run`` may depend; the others become NaN.

    A tensor is not needed if its module runs, so that other inputs would not use it in another way, and the output is
    the same with 0 and with NaN in its place. A tensor whose module does not run may be for other inputs, as those of
    an expert are, and is needed; so is one of a dtype without NaN. So are all of them where ``run`` raises or gives no
    numbers without them.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    needed, owners = list[str](), defaultdict[str, list[str]](list)
    for name in sorted(names):
        (owners[name.rpartition(".")[0]] if tensors[name].is_floating_point() else needed).append(name)

    def fill(these: Collection[str], value: float) -> None:
        for name in these:
            tensors[name].fill_(value)

    fill(names, 0.0)
    try:
        with _noting_calls(model) as called:
            expected = run()
    except Exception:  # models raise what they like
        return sorted(names)
    if not all(bool(each.isfinite().all()) for each in expected):
        return sorted(names)
    for owner, own in owners.items():
        fill(own, torch.nan)
        if owner not in called or not _is_same(run, expected):
            fill(own, 0.0)
            needed += own
    return sorted(needed)


def list_needed_by_encoder(
    directory: Path, model: Any, adapter: ModelAdapter, names: Collection[str], dtype: torch.dtype
) -> list[str]:
    """List those of an encoder's tensors ``names`` on which features of any kind of media may depend.

    ``list_needed`` says how. Raises as ``RequestProcessor`` does.
    """
    processor = RequestProcessor(directory)
    try:
        samples = process_samples(processor)
    finally:
        processor.close()

    def run() -> list[Tensor]:
        return [
            rows
            for made in samples
            for span, inputs in zip(made.work.media, made.inputs, strict=True)
            for rows in adapter.encode(model, span.kind, [_as_tensors(inputs, dtype)], [span.tokens])
        ]

    return list_needed(model, names, run)


def _as_tensors(inputs: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


def _is_same(run: Run, expected: Sequence[Tensor]) -> bool:
    try:
        found = run()
    except Exception:  # as above
        return False
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@contextmanager
def _noting_calls(model: Any) -> Iterator[set[str]]:
    """Note the names of the modules that run."""
    called = set[str]()
    hooks = [
        each.register_forward_pre_hook(lambda _, __, name=name: called.add(name))
        for name, each in model.named_modules()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()
