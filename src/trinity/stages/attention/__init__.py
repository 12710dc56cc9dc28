"""Paged attention: the interface to transformers, and backends for CPUs and GPUs."""
