"""Command ``python -m trinity.check``, which ``trinity.stages.proof.command`` implements."""

import runpy

if __name__ == "__main__":  # by name, as trinity.instance does
    runpy.run_module("trinity.stages.proof.command", run_name="__main__", alter_sys=True)
