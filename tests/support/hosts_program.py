"""A pipeline on the instances of a file of hosts, in a program of its own (``support.asked_pipeline``).

    python hosts_program.py FILE MODEL PHOTO CERTIFICATE KEY AUTHORITY

MODEL may be "emulated".
"""

from __future__ import annotations

import asyncio
import sys

import trinity
from support.asked_pipeline import serve


async def main(file: str, model: str, photo: str, *tls: str) -> None:
    config = trinity.ProcessConfig(tls=trinity.TLSConfig(*tls), silence_s=10.0)
    await serve(model, photo, trinity.read_hosts(file).placement, config)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
