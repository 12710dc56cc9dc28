"""Paged attention: the interface to transformers, and a backend for each kind of device."""
