"""The kernels as single-pass loops over NumPy arrays, compiled by Numba."""
