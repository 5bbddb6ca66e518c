"""Engines that move tensors, one file each, and the run that this process is part of."""
