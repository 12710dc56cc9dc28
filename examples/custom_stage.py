"""An encode stage of your own, with your own nn.Module, in a pipeline put together by hand.

python examples/custom_stage.py                  a tiny random LLaVA, built here, offline
python examples/custom_stage.py --model DIR      your own checkpoint
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch

import trinity
from trinity.stages import IMAGE, Encode, Open, Sampled, StageSetup, Step

PHOTO = Path(__file__).parent / "photos" / "cat.jpg"


class Mosaic(torch.nn.Module):
    """An encoder as simple as can be: the mean colour of each of ``tokens`` stripes, as ``width`` features."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__()
        self.lift = torch.nn.Linear(3, width, bias=False)
        torch.nn.init.normal_(self.lift.weight, generator=torch.Generator().manual_seed(seed))

    def forward(self, pixels: torch.Tensor, tokens: int) -> torch.Tensor:
        stripes = torch.nn.functional.adaptive_avg_pool1d(pixels.flatten(1), tokens)  # [3, tokens]
        features: torch.Tensor = self.lift(stripes.T)
        return features


class MosaicStage:
    """Runs a Mosaic where the model's vision tower would run: media items in, rows of image-cache blocks out."""

    letters = "E"

    def __init__(self, setup: StageSetup) -> None:
        self.cache = setup.memory[IMAGE].tensor  # [blocks, rows, width]
        self.encoder = Mosaic(self.cache.shape[2]).to(self.cache.device, self.cache.dtype)

    def open(self, request: Open) -> None:
        """Nothing is kept of a request."""

    def close(self, request: str) -> None:
        """Nothing is kept of a request."""

    @torch.inference_mode()
    def forward(self, step: Step) -> dict[str, Sampled]:
        for item in step.encodes:
            self._encode(item)
        return {}  # only language stages sample tokens

    def _encode(self, item: Encode) -> None:
        pixels = item.inputs["pixel_values"].reshape(-1, 3, *item.inputs["pixel_values"].shape[-2:])[0]
        features = self.encoder(pixels.to(self.cache), item.span.tokens)
        for block, rows in zip(item.blocks, features.split(self.cache.shape[1]), strict=True):
            self.cache[block, : len(rows)] = rows


def question() -> trinity.Request:
    sampling = trinity.Sampling(ignore_eos=True)
    return trinity.Request("<image>\nWhat is this?", images=[PHOTO], max_tokens=16, sampling=sampling)


async def ask(model: Path, *stages: type[MosaicStage]) -> trinity.Output:
    """One question about the cat; ``stages`` take the place of the built-in ones of their letters."""
    instances = [trinity.Instance("E", stages=stages), trinity.Instance("P"), trinity.Instance("D")]
    async with trinity.Pipeline(model, instances, connector=trinity.Connector("inproc"), dtype="float32") as pipe:
        return await pipe.complete(question())


async def main(model: Path) -> None:
    for name, stages in (("the model's own encoder", ()), ("Mosaic", (MosaicStage,))):
        output = await ask(model, *stages)
        print(f"{name}, by {' -> '.join(output.route)}: {output.token_ids}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        from trinity.testing.checkpoints import build_checkpoint

        asyncio.run(main(parser.parse_args().model or build_checkpoint("llava", Path(folder))))
