"""Emulated stages, which sleep for the time that a cost model predicts instead of computing; all else is real."""
