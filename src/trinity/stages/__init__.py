"""Stages: what runs a part of a model on an instance; the paged attention, adapters and sampling that they use."""
