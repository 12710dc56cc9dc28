"""Stages that sleep for as long as a cost model says, in place of computing; all else is real."""
