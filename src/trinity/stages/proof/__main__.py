"""Command ``python -m trinity.stages.proof DIRECTORY``: run the proof, keep its verdict, print it as JSON."""

import sys
from pathlib import Path

import msgspec

from trinity.stages.proof.prove import prove

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(prove(Path(sys.argv[1]))))
