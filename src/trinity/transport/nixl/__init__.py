"""nixl: NIXL over UCX; the target reads a peer's pool (nixl), or the source writes (nixl-push)."""
