"""Detection of shifts in a pipeline's traffic, and proposals of a better placement."""
