"""The kernels for TensorFlow tensors."""
