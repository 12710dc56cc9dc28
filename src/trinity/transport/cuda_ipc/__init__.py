"""CUDA IPC: pools on GPUs of one host, opened by peers."""
