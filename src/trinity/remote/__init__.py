"""Control plane of instances in other processes.

On the pipeline's side, ``supervision`` starts, watches and restarts all instance processes. They come from a supply:
forked here, on ``hosts``, or on a cluster (``ray``). On the instance's side, ``server`` listens and admits one pipeline
at a time, ``session`` serves that pipeline, and ``fork_server`` forks instances from one process. Both sides exchange
messages of ``channel``.
"""
