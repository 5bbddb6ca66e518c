"""The kernels for torch tensors."""
