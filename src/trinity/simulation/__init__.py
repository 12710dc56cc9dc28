"""Placements served in virtual time by the cores that serve, and a compiled engine beside them."""
