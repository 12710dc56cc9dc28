"""trinity bench serve CHECKPOINT --trace TRACE --slo TTFT,TBT --rates R,R,... | cpu CHECKPOINT

serve measures goodput in open loop from a recorded trace, by bisection, under the 90 % and the 99 % rule. cpu measures
requests per CPU second. Both compare trinity with other engines (--peer), each in a process of its own; make
bench-peers installs these.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from trinity.bench import commands
from trinity.bench.servers import DTYPES, PEERS
from trinity.errors import TrinityError
from trinity.traces.trace import SLO

_EXAMPLE = """example:
  trinity bench cpu path/to/llava --requests 8
  trinity bench serve path/to/llava --trace servegen-image-1h --slo 2,0.08 --rates 0.5,1,2"""


def parse_numbers(text: str) -> list[float]:
    """Parse numbers such as ``0.5,1,2``."""
    return [float(each) for each in text.split(",")]


def parse_counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def parse_positive(text: str) -> int:
    """Parse a count of at least one."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"give 1 or more, got {count}")
    return count


def parse_slo(text: str) -> SLO:
    """Parse ``TTFT,TBT`` in seconds."""
    ttft, tbt = parse_numbers(text)
    return SLO(ttft, tbt)


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trinity bench", description=__doc__, epilog=_EXAMPLE, formatter_class=formatter
    )
    kinds = parser.add_subparsers(dest="command", required=True)
    serve, cpu = kinds.add_parser("serve", help="goodput in open loop"), kinds.add_parser("cpu", help="per CPU second")
    for each in (serve, cpu):
        each.add_argument("checkpoint", type=Path, help="a directory in transformers' format")
        each.add_argument("--peer", action="append", default=[], choices=PEERS, help="another engine beside trinity")
        each.add_argument(
            "--threads", type=parse_positive, default=1, help="intra-op threads of an instance, and of a peer"
        )
        each.add_argument(
            "--sweep", type=parse_counts, default=[512, 2048], help="token budgets of a step to try with every engine"
        )
        each.add_argument(
            "--prompt", type=parse_positive, default=28, help="tokens of text of a request (serve: at the median)"
        )
        each.add_argument("--output", type=parse_positive, default=32, help="tokens to generate (serve: at the median)")
        each.add_argument("--images", type=int, default=1, help="images of a request, at most")
        each.add_argument("--caches", choices=["off", "on", "both"], default="off", help="prefix and image caches")
        each.add_argument("--json", type=Path, help="file for all results")
    _add_serve(serve)
    cpu.add_argument("--dtype", action="append", choices=DTYPES, help="float32, bfloat16 or both (the default)")
    cpu.add_argument("--requests", type=parse_positive, default=8, help="requests sent at once")
    cpu.add_argument("--rounds", type=parse_positive, default=5, help="measured bursts of each engine")
    return parser


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--trace", required=True, help="a file, or the name of a shipped trace")
    serve.add_argument("--placement", action="append", help="trinity's, several to compare (default: EPD)")
    serve.add_argument("--slo", type=parse_slo, action="append", required=True, metavar="TTFT,TBT", help="seconds")
    serve.add_argument("--rates", type=parse_numbers, required=True, help="requests/s to begin with, such as 0.5,1,2")
    serve.add_argument(
        "--seeds", type=parse_positive, default=3, help="stretches of the trace, each with a bisection of its own"
    )
    serve.add_argument("--requests", type=parse_positive, default=100, help="requests of a trial")
    serve.add_argument("--dtype", choices=DTYPES, default="float32")
    serve.add_argument("--minutes", type=float, default=60.0, help="no further trial begins after these")
    serve.add_argument("--plot", type=Path, help="file for a plot of attainment over the rate: .png, .svg, .pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure goodput or requests per CPU second, of placements and of other engines."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    run = commands.run_serve if args.command == "serve" else commands.run_cpu
    try:
        asyncio.run(run(args))
    except TrinityError as error:
        parser.exit(2, f"{type(error).__name__}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
