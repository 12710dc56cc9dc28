"""CUDA graphs of steps, and what they keep on the device."""
