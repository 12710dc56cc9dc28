"""Servers to measure, each in its own process; those of other engines run under Pythons without trinity."""
