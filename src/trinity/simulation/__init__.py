"""Serves placements in virtual time, by the serving cores themselves or by a compiled engine."""
