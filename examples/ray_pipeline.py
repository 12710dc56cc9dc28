"""A pipeline whose instances run on the hosts of a Ray cluster; docs/ray.md says how to start one.

python examples/ray_pipeline.py MODEL PLACEMENT          MODEL: a folder that every host has, PLACEMENT: such as 1E1P1D
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import trinity

PHOTO = Path(__file__).parent / "photos" / "cat.jpg"


async def main(model: str, placement: str) -> None:
    supply = trinity.RaySupply(placement, trusted_network=True)
    blocks = trinity.Connector("auto", options={"trusted_network": True})
    processes = trinity.ProcessConfig(supply=supply)
    async with trinity.Pipeline(model, placement, hosting="process", connector=blocks, processes=processes) as pipe:
        output = await pipe.complete(trinity.Request("<image>\nWhat is this?", images=[PHOTO], max_tokens=16))
        print(f"{' -> '.join(output.route)}: {output.text}")
        for each in output.transfers:
            way = f"{each['source']} -> {each['target']}"
            print(f"{each['kind']} blocks {way} by {each['scheme']}: {each['bytes']} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/ray_pipeline.py MODEL PLACEMENT")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    asyncio.run(main(*sys.argv[1:]))
