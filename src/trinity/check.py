"""Command ``python -m trinity.check``, which ``trinity.commands.check`` implements."""

import runpy

if __name__ == "__main__":  # by name, as trinity.instance does
    runpy.run_module("trinity.commands.check", run_name="__main__", alter_sys=True)
