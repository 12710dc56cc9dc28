"""A pipeline on Ray's hosts, in a program of its own (``support.asked_pipeline``).

    python ray_program.py ADDRESS MODEL PHOTO CERTIFICATE KEY AUTHORITY

MODEL may be "emulated".
"""

from __future__ import annotations

import asyncio
import sys

import trinity
from support.asked_pipeline import RIGHT as RIGHT
from support.asked_pipeline import serve

PLACEMENT = "1E1P1D"


async def main(address: str, model: str, photo: str, *tls: str) -> None:
    supply = trinity.RaySupply(PLACEMENT, address=address)
    config = trinity.ProcessConfig(supply=supply, tls=trinity.TLSConfig(*tls), silence_s=10.0)
    await serve(model, photo, PLACEMENT, config)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
