"""Attention backends for GPUs."""
