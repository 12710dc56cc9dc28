"""Faster kernels for parts of transformers' own layers, each taken only where it gives the same results."""
