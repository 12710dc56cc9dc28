"""Control plane of instances in other processes.

On the pipeline's side, ``supervisor`` keeps all instance processes alive, which come from a ``supply``;
``instance_client`` speaks with one of them, and ``fork_client`` with the process that forks them, which runs
``fork_server`` and may wait for the next pipeline (``warm_launchers``). On a Ray cluster they come from ``ray_supply``,
which asks a ``ray_driver`` through a ``ray_session`` for hosts by ``ray_bundles``, and has ``ray_host`` run there. On
the instance's side, ``server`` listens and admits one pipeline at a time, and ``session`` serves that pipeline. Both
sides exchange ``wire`` messages over a ``channel``, which a ``listener`` accepts and both ends open with a
``handshake``, in ``tls`` where certificates are given.
"""
