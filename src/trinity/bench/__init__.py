"""Benchmarks of one's own: trinity beside other engines, in open loop and by the CPU second."""
