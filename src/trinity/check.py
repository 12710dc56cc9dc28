"""Command ``python -m trinity.check``: ``trinity check`` by the name of a module."""

import runpy
import sys

if __name__ == "__main__":  # by name, as trinity.instance does
    sys.argv.insert(1, "check")
    runpy.run_module("trinity", run_name="__main__", alter_sys=True)
