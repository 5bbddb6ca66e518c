"""Engines that move TensorFlow tensors."""
