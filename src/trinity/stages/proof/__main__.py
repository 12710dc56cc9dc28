"""Command ``python -m trinity.stages.proof DIRECTORY``: run the proof, keep its verdict, print it as JSON."""

import sys
from pathlib import Path

import msgspec

from trinity.errors import TrinityError
from trinity.preprocess.verdicts import NOT_LOADED
from trinity.stages.proof.prove import prove


def main() -> int:
    """Prove a checkpoint. Returns ``NOT_LOADED``, with the reason alone on stderr, for one that cannot be loaded."""
    try:
        verdict = prove(Path(sys.argv[1]))
    except TrinityError as error:
        sys.stderr.write(f"\n{error}")
        return NOT_LOADED
    sys.stdout.buffer.write(msgspec.json.encode(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
