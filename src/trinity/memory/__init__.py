"""Memory behind block pools: typed tensors, native block copies and digests."""
