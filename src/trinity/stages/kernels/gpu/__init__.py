"""Layers in Triton and fp8 for GPUs, in place of those of transformers."""
