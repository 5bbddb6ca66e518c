"""The kernels for torch tensors on GPUs, written in Triton."""
