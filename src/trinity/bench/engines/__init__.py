"""Servers under measurement, each in a process of its own. Those of other engines run under Pythons without trinity."""
