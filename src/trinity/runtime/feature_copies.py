"""Copies of features out of an encoder cache, for a reader outside the instances."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from trinity.core.messages import Collect, Collected, Failure
from trinity.errors import describe_error
from trinity.memory.block_memory import BlockMemory
from trinity.memory.devices import use_copy_stream
from trinity.stage_kinds import ENCODE

if TYPE_CHECKING:
    import torch


async def copy_features(memory: BlockMemory, command: Collect, instance: str) -> Collected:
    """Copy features to memory of the host, on a thread; ``memory`` is the image cache of ``instance``.

    What goes wrong is the failure in the answer.
    """
    try:
        return Collected(command.request, await asyncio.to_thread(_copy, memory, command))
    except Exception as error:  # of the device, or no memory
        text = f"the features could not be copied on {instance} ({describe_error(error)})"
        return Collected(command.request, (), Failure("StageError", text, {"stage": ENCODE.letter}))


def _copy(memory: BlockMemory, command: Collect) -> tuple[torch.Tensor, ...]:
    with use_copy_stream(memory.gpu):
        return tuple(_copy_item(memory, blocks, rows) for blocks, rows in command.items)


def _copy_item(memory: BlockMemory, blocks: tuple[int, ...], rows: int) -> torch.Tensor:
    """Copy the first ``rows`` rows of these blocks: [rows, width]. Blocks chosen by a list are a copy by themselves."""
    import torch

    if memory.raw is None:
        found = memory.tensor[list(blocks)]
    elif isinstance(memory.shape.dtype, torch.dtype):
        found = torch.from_numpy(memory.raw[list(blocks)]).view(memory.shape.dtype)
    else:  # of an emulated model: numbers that stand for rows
        found = torch.from_numpy(memory.raw[list(blocks)].view("int64"))
    return found.view(len(blocks) * memory.shape.shape[0], -1)[:rows].cpu()
