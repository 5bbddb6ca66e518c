"""Engines that move torch tensors."""
