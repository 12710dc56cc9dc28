"""Command ``python -m trinity``, which is ``trinity``."""

import sys

from trinity.commands import main

if __name__ == "__main__":
    sys.exit(main())
