"""ucx: a thread of the source sends blocks over UCX, by ucxx."""
