"""Faster kernels for parts of transformers' layers, each used only where it gives the same results."""
