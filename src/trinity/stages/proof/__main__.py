"""Command ``python -m trinity.stages.proof DIRECTORY [PARENT]``: run the proof, keep its verdict, print it as JSON.

With the number of the process that started it, it ends with that: nobody would hear the verdict.
"""

import sys
from pathlib import Path

import msgspec

from trinity.errors import TrinityError
from trinity.errors.parent_process import die_with_parent
from trinity.preprocess.checkpoint.verdicts import NOT_LOADED
from trinity.stages.proof.prove import prove


def main() -> int:
    """Prove a checkpoint. Returns ``NOT_LOADED``, with the reason alone on stderr, for one that cannot be loaded."""
    if len(sys.argv) > 2:
        die_with_parent(int(sys.argv[2]))
    try:
        verdict = prove(Path(sys.argv[1]))
    except TrinityError as error:
        sys.stderr.write(f"\n{error}")
        return NOT_LOADED
    sys.stdout.buffer.write(msgspec.json.encode(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
