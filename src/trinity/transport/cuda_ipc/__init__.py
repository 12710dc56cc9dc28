"""cuda_ipc: pools on GPUs of one host, mapped by peers through CUDA IPC."""
