"""NIXL over UCX: a peer's pool read by the target, or pushed by the source."""
