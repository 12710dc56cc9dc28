"""python -m trinity.bench serve CHECKPOINT --trace TRACE --slo TTFT,TBT --rates R,R,... | cpu CHECKPOINT

serve: goodput in open loop from a recorded trace, by bisection, under the 90 % and the 99 % rule. cpu: requests per
CPU second. Both beside other engines (--peer), each in a process of its own: make bench-peers installs them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from trinity.bench import commands
from trinity.bench.servers import DTYPES, PEERS
from trinity.errors import TrinityError
from trinity.traces.trace import SLO


def numbers(text: str) -> list[float]:
    """``0.5,1,2``."""
    return [float(each) for each in text.split(",")]


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def some(text: str) -> int:
    """At least one."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more, got {count}")
    return count


def slo(text: str) -> SLO:
    """``TTFT,TBT`` in seconds."""
    ttft, tbt = numbers(text)
    return SLO(ttft, tbt)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m trinity.bench", description=__doc__)
    kinds = made.add_subparsers(dest="command", required=True)
    serve, cpu = kinds.add_parser("serve", help="goodput in open loop"), kinds.add_parser("cpu", help="per CPU second")
    for each in (serve, cpu):
        each.add_argument("checkpoint", type=Path, help="a directory in transformers' format")
        each.add_argument("--peer", action="append", default=[], choices=PEERS, help="another engine beside trinity")
        each.add_argument("--threads", type=some, default=1, help="intra-op threads of an instance, and of a peer")
        each.add_argument("--sweep", type=counts, default=[512, 2048], help="tokens a step, tried with every engine")
        each.add_argument("--prompt", type=some, default=28, help="tokens of text of a request (serve: at the median)")
        each.add_argument("--output", type=some, default=32, help="tokens to generate (serve: at the median)")
        each.add_argument("--images", type=int, default=1, help="images of a request, at most")
        each.add_argument("--caches", choices=["off", "on", "both"], default="off", help="prefix and image caches")
        each.add_argument("--json", type=Path, help="where everything that was measured goes")
    _add_serve(serve)
    cpu.add_argument("--dtype", action="append", choices=DTYPES, help="float32, bfloat16 or both (the default)")
    cpu.add_argument("--requests", type=some, default=8, help="asked for at once")
    cpu.add_argument("--rounds", type=some, default=5, help="bursts that count, of each engine")
    return made


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--trace", required=True, help="a file, or the name of a shipped trace")
    serve.add_argument("--placement", action="append", help="of trinity; several are compared (default: EPD)")
    serve.add_argument("--slo", type=slo, action="append", required=True, metavar="TTFT,TBT", help="seconds")
    serve.add_argument("--rates", type=numbers, required=True, help="requests/s to begin with, such as 0.5,1,2")
    serve.add_argument("--seeds", type=some, default=3, help="stretches of the trace, each with a bisection of its own")
    serve.add_argument("--requests", type=some, default=100, help="of a trial")
    serve.add_argument("--dtype", choices=DTYPES, default="float32")
    serve.add_argument("--minutes", type=float, default=60.0, help="after which no further trial is begun")
    serve.add_argument("--plot", type=Path, help="a picture of attainment over the rate: .png, .svg, .pdf")


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    asked = made.parse_args(arguments)
    run = commands.serve if asked.command == "serve" else commands.cpu
    try:
        asyncio.run(run(asked))
    except TrinityError as error:
        made.exit(2, f"{type(error).__name__}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
